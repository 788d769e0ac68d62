// Connections are counted by the sockets that are really open, in all and of each peer.
#include "server/rpc/connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

// Longer than the pause between two counts.
static void wait_for_count(void) {
  const struct timespec pause = {.tv_nsec = 150 * 1000 * 1000};
  nanosleep(&pause, NULL);
}

static int new_socket(void) {
  const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_true(made >= 0);
  return made;
}

static qkvi_rpc_admission admit(qkvi_rpc_connections *connections, int accepted, const char *ip) {
  struct sockaddr_in ipv4 = {.sin_family = AF_INET};
  struct sockaddr_in6 ipv6 = {.sin6_family = AF_INET6};
  const struct sockaddr_un local = {.sun_family = AF_UNIX};
  const struct sockaddr *peer = (const struct sockaddr *)&local;
  if (ip != NULL && inet_pton(AF_INET, ip, &ipv4.sin_addr) == 1) {
    peer = (const struct sockaddr *)&ipv4;
  } else if (ip != NULL) {
    assert_int_equal(inet_pton(AF_INET6, ip, &ipv6.sin6_addr), 1);
    peer = (const struct sockaddr *)&ipv6;
  }
  return qkvi_rpc_connections_admit(connections, accepted, peer);
}

static void connections_in_all_are_limited(void **state) {
  (void)state;
  qkvi_rpc_connections *connections = qkvi_rpc_connections_create(3, 3);
  int sockets[4];
  for (int i = 0; i < 3; i++)
    assert_int_equal(admit(connections, sockets[i] = new_socket(), NULL), QKVI_RPC_ADMITTED);
  sockets[3] = new_socket();
  assert_int_equal(admit(connections, sockets[3], "10.0.0.1"), QKVI_RPC_TOO_MANY);
  assert_int_equal(qkvi_rpc_connections_refused(connections), 1);
  assert_int_equal(qkvi_rpc_connections_open(connections), 3);
  // One ends silently; its number stays free.
  close(sockets[1]);
  wait_for_count();
  assert_int_equal(admit(connections, sockets[3], "10.0.0.1"), QKVI_RPC_ADMITTED);
  assert_int_equal(qkvi_rpc_connections_open(connections), 3);
  close(sockets[0]);
  close(sockets[2]);
  close(sockets[3]);
  wait_for_count();
  assert_int_equal(qkvi_rpc_connections_open(connections), 0);
  qkvi_rpc_connections_destroy(&connections);
}

static void a_peer_leaves_half_to_others(void **state) {
  (void)state;
  qkvi_rpc_connections *connections = qkvi_rpc_connections_create(8, 0);
  int sockets[8], count = 0;
  for (int i = 0; i < 4; i++)
    assert_int_equal(admit(connections, sockets[count++] = new_socket(), "10.0.0.1"), QKVI_RPC_ADMITTED);
  const int fifth = new_socket();
  assert_int_equal(admit(connections, fifth, "10.0.0.1"), QKVI_RPC_TOO_MANY_OF_PEER);
  assert_int_equal(admit(connections, fifth, "::ffff:10.0.0.1"), QKVI_RPC_TOO_MANY_OF_PEER);
  assert_int_equal(admit(connections, fifth, "10.0.0.2"), QKVI_RPC_ADMITTED);
  // Addresses of one IPv6 network are one peer's.
  for (int i = 0; i < 3; i++) {
    static const char *const ips[] = {"2001:db8::1", "2001:db8::2", "2001:db8:0:0:1::1"};
    assert_int_equal(admit(connections, sockets[count++] = new_socket(), ips[i]), QKVI_RPC_ADMITTED);
  }
  const int ninth = new_socket();
  assert_int_equal(admit(connections, ninth, "2001:db8:0:1::1"), QKVI_RPC_TOO_MANY);
  close(ninth);
  close(fifth);
  for (int i = 0; i < count; i++) close(sockets[i]);
  qkvi_rpc_connections_destroy(&connections);
}

static void a_descriptor_that_comes_again_is_another_connection(void **state) {
  (void)state;
  qkvi_rpc_connections *connections = qkvi_rpc_connections_create(4, 1);
  const int first = new_socket();
  assert_int_equal(admit(connections, first, "10.0.0.1"), QKVI_RPC_ADMITTED);
  for (int i = 0; i < 100; i++) {  // no count is made: there is no time for it
    close(first);
    assert_int_equal(new_socket(), first);
    assert_int_equal(admit(connections, first, i % 2 == 0 ? "10.0.0.1" : "10.0.0.2"), QKVI_RPC_ADMITTED);
  }
  assert_int_equal(qkvi_rpc_connections_open(connections), 1);
  assert_int_equal(qkvi_rpc_connections_refused(connections), 0);
  close(first);
  qkvi_rpc_connections_destroy(&connections);
}

static void a_descriptor_that_became_a_file_is_no_connection(void **state) {
  (void)state;
  qkvi_rpc_connections *connections = qkvi_rpc_connections_create(1, 1);
  const int first = new_socket();
  assert_int_equal(admit(connections, first, NULL), QKVI_RPC_ADMITTED);
  const int second = new_socket();
  assert_int_equal(dup2(STDIN_FILENO, first), first);
  wait_for_count();
  assert_int_equal(admit(connections, second, NULL), QKVI_RPC_ADMITTED);
  close(first);
  close(second);
  qkvi_rpc_connections_destroy(&connections);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(connections_in_all_are_limited),
      cmocka_unit_test(a_peer_leaves_half_to_others),
      cmocka_unit_test(a_descriptor_that_comes_again_is_another_connection),
      cmocka_unit_test(a_descriptor_that_became_a_file_is_no_connection),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
