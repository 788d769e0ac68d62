"""What every gRPC client expects: health, reflection, UNIMPLEMENTED for what is not there."""

import threading

import grpc
import pytest
from google.protobuf import descriptor_pb2

from daemon import PATIENCE, SANITIZED, Daemon
from health.v1 import health_pb2, health_pb2_grpc
from kv import TIMEOUT, refused
from qkv.v1 import admin_pb2, admin_pb2_grpc, kv_cache_pb2, model_pb2, shared_memory_pb2, shared_memory_pb2_grpc
from reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

SERVICES = {"qkv.v1.KvCache", "qkv.v1.Admin", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def health(daemon, service="", target=None):
    stub = health_pb2_grpc.HealthStub(daemon.channel(target))
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT).status


def reflect(daemon, **request):
    """The answers to requests on one reflection stream."""
    stub = reflection_pb2_grpc.ServerReflectionStub(daemon.channel())
    requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
    return list(stub.ServerReflectionInfo(requests, timeout=TIMEOUT))


def test_health_of_daemon_and_service_over_both_sockets(daemon, stub):
    serving = health_pb2.HealthCheckResponse.SERVING
    assert health(daemon) == serving
    assert health(daemon, "qkv.v1.KvCache") == serving
    assert health(daemon, target=daemon.tcp) == serving


def test_health_of_unknown_service(daemon, stub):
    with refused(grpc.StatusCode.NOT_FOUND, "no.such.Service"):
        health(daemon, "no.such.Service")


def test_health_watch_tells_of_the_drain():
    with Daemon("--drain-grace", "5s") as daemon:
        stub = health_pb2_grpc.HealthStub(daemon.channel())
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        daemon.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with refused(grpc.StatusCode.UNAVAILABLE, "draining"):
            next(watch)
        assert daemon.wait() == 0


def test_reflection_lists_the_services(daemon, stub):
    (answer,) = reflect(daemon, list_services="")
    assert {service.name for service in answer.list_services_response.service} >= SERVICES


@pytest.mark.parametrize("symbol", ["qkv.v1.KvCache", "qkv.v1.KvCache.Attend", "qkv.v1.Tensor", "grpc.health.v1.Health"])
def test_reflection_finds_the_file_of_a_symbol(daemon, stub, symbol):
    (answer,) = reflect(daemon, file_containing_symbol=symbol)
    files = [descriptor_pb2.FileDescriptorProto.FromString(data)
             for data in answer.file_descriptor_response.file_descriptor_proto]
    name = symbol.split(".")[-2 if symbol.endswith("Attend") else -1]
    assert any(name in [x.name for x in [*file.service, *file.message_type]] for file in files)


def test_reflection_finds_a_file_by_name(daemon, stub):
    (answer,) = reflect(daemon, file_by_filename="qkv/v1/tensor.proto")
    files = [descriptor_pb2.FileDescriptorProto.FromString(data)
             for data in answer.file_descriptor_response.file_descriptor_proto]
    assert "qkv/v1/tensor.proto" in [file.name for file in files]


def test_reflection_answers_errors_on_the_stream(daemon, stub):
    for request in ({"file_containing_symbol": "no.such.Symbol"}, {"file_by_filename": "no/such.proto"}):
        (answer,) = reflect(daemon, **request)
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
        assert "no" in answer.error_response.error_message


def test_reflection_answers_many_requests_on_one_stream(daemon, stub):
    reflection = reflection_pb2_grpc.ServerReflectionStub(daemon.channel())
    requests = [reflection_pb2.ServerReflectionRequest(file_by_filename=f"qkv/v1/{name}.proto")
                for name in ("tensor", "model", "kv_cache", "objects", "admin", "shared_memory")]
    answers = list(reflection.ServerReflectionInfo(iter(requests), timeout=TIMEOUT))
    assert [answer.original_request.file_by_filename for answer in answers] == [
        request.file_by_filename for request in requests]
    assert all(answer.HasField("file_descriptor_response") for answer in answers)


def test_methods_that_are_not_served(daemon, stub):
    admin = admin_pb2_grpc.AdminStub(daemon.channel())
    memory = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
    for call, request in ((memory.CudaSharedMemoryStatus, shared_memory_pb2.CudaSharedMemoryStatusRequest()),
                          (memory.CudaSharedMemoryUnregister, shared_memory_pb2.CudaSharedMemoryUnregisterRequest())):
        with refused(grpc.StatusCode.UNIMPLEMENTED):
            call(request, timeout=TIMEOUT)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "data-dir"):
        admin.Compact(admin_pb2.CompactRequest(), timeout=TIMEOUT)


def test_methods_nobody_knows_are_answered(daemon, stub):
    channel = daemon.channel()
    for path in ("/qkv.v1.KvCache/NoSuchMethod", "/no.such.Service/Method", "/x"):
        with refused(grpc.StatusCode.UNIMPLEMENTED):
            channel.unary_unary(path)(b"", timeout=PATIENCE)


def test_status(daemon, stub):
    status = daemon.status()
    assert status.state == "serving"
    assert status.version
    assert status.kv_bytes_limit > 0
    assert status.rss_bytes > 0
    assert set(status.listen) == set(daemon.addresses)
    assert {metric.type for metric in status.metrics} == {"counter", "gauge"}
    assert len({metric.name for metric in status.metrics}) == len(status.metrics)
    assert all(metric.name.startswith("qkvd_") and metric.help for metric in status.metrics)
    listen = next(option for option in status.options if option.name == "listen")
    assert listen.source == "flag" and daemon.socket in listen.value


def test_many_clients_at_once(daemon, stub):
    failures = []

    def client():
        try:
            own = daemon.stub(daemon.tcp)
            for _ in range(50):
                own.ListModels(model_pb2.ListModelsRequest(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            failures.append(error)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(SANITIZED, reason="a sanitizer's own memory is counted too")
def test_idle_daemon_is_small():
    with Daemon() as daemon:
        daemon.status()
        assert daemon.rss_bytes() < 60 << 20
