// qkvd: the daemon's main thread.
//
// libuv owns it: signals, timers for the gauges and for idle memory, and for calibrations and tiers, which are
// upkeep of the executor. SIGTERM, SIGINT or Admin.Drain drains (in a thread of its own, so that the loop goes on)
// and exits 0; a second signal exits at once with 1.
#include <assert.h>
#include <jansson.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <uv.h>

#include "engine/kernel/kernel.h"
#include "server/check_health.h"
#include "server/daemon.h"
#include "server/http/http.h"
#include "server/service.h"

#define GAUGES_EVERY_MS 1000
#define TEND_EVERY_MS 250
#define KEEP_EVERY_MS 50
#define LEARN_EVERY_MS 250
#define RETIER_EVERY_MS 250
#define RETIER_AGAIN_MS 10  // while memory is short
#define FILES_FEW 4096
// What a drain may take beyond its grace: cancelled calls end with the job they are in.
#define DRAIN_SLACK_MS 20000

typedef struct main_loop main_loop;

struct main_loop {
  qkv_daemon *daemon;
  uv_loop_t loop;
  uv_signal_t terminate, interrupt, hangup;
  uv_timer_t gauges, keep, tend, learning, tiers, deadline, watchdog;
  uv_thread_t drain;
  uv_async_t drained, learnt, retiered, asked;
  bool signalled, draining, ended, learns, retiers;  // ended: no call is left
  _Atomic bool chosen;                               // which thread drains, and how
  int64_t notice_ms, grace_ms;                       // of that thread
  _Atomic bool more_tiers;                           // a job writes it, the loop reads it
};

// As many connections as the system allows; further ones wait until a descriptor is free (server/rpc/listen.c).
static void raise_file_limit(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_max < FILES_FEW) {
    qkv_log(QKV_LOG_WARN, "few file descriptors: more connections than this have to wait", "{s:I}", "limit",
            (json_int_t)limit.rlim_max);
  }
}

static int refuse(const qkv_error *error) {
  fprintf(stderr, "qkvd: %s\n", error->text);
  return EXIT_FAILURE;
}

// ---- The lists ----

static void print_options(const qkv_options *set) {
  static const char *const sources[] = {"default", "file", "environment", "flag"};
  for (size_t i = 0; i < qkv_server_option_count; i++) {
    char text[1024];
    const char *name = qkv_server_option_table[i].name;
    qkv_options_text(set, i, text, sizeof(text));
    printf("%s: %s  # %s\n", name, text, sources[qkv_options_source(set, name)]);
  }
}

static void print_metrics(void) {
  for (size_t i = 0; i < QKV_METRIC_COUNT; i++) {
    const qkv_metric *metric = &qkv_metric_table[i];
    printf("%-32s %-8s %s\n", metric->name, metric->kind == QKV_COUNTER ? "counter" : "gauge", metric->help);
  }
}

static void print_help(const qkv_options *set) {
  printf("qkvd serves a KV cache for LLM inference over gRPC.\n\nUsage: qkvd [OPTION]...\n\n");
  qkv_options_help(set, stdout);
}

// Whether the command line asked for text instead of service.
static bool print_only(const qkv_server_options *options, const qkv_options *set) {
  if (options->help) {
    print_help(set);
  } else if (options->version) {
    printf("qkvd %s\n", QKV_VERSION);
  } else if (options->print_options) {
    print_options(set);
  } else if (options->print_metrics) {
    print_metrics();
  } else {
    return false;
  }
  return true;
}

// ---- The loop ----

static void on_gauges(uv_timer_t *timer) {
  main_loop *state = timer->data;
  qkv_daemon_update_gauges(state->daemon);
  if (!state->draining) qkv_daemon_reload(state->daemon, false);
}

static void on_keep(uv_timer_t *timer) {
  const main_loop *state = timer->data;
  if (!state->draining) qkv_daemon_keep_memory(state->daemon);
}

// Not in the background: malloc's and the heap's locks are held.
static void on_tend(uv_timer_t *timer) {
  const main_loop *state = timer->data;
  if (!state->draining) qkv_daemon_tend(state->daemon);
}

// Also while it drains.
static void on_watchdog(uv_timer_t *timer) {
  (void)timer;
  qkv_service_notify("WATCHDOG=1");
}

static void close_ended(main_loop *state);

static void learn(void *context) {
  main_loop *state = context;
  qkv_daemon_learn(state->daemon);
  uv_async_send(&state->learnt);
}

static void on_learnt(uv_async_t *async) {
  main_loop *state = async->data;
  state->learns = false;
  close_ended(state);
}

// In a background job; false, to be tried again later, where too many jobs wait.
static bool submit(const main_loop *state, qkv_job_fn *job) {
  return qkv_executor_submit(state->daemon->executor, QKV_WORK_UPKEEP, job, (void *)state) == QKV_OK;
}

// The loop does not end before the job has.
static void on_learn(uv_timer_t *timer) {
  main_loop *state = timer->data;
  if (state->learns || state->draining) return;
  state->learns = true;
  if (!submit(state, learn)) state->learns = false;
}

static void retier(void *context) {
  main_loop *state = context;
  state->more_tiers = qkv_daemon_retier(state->daemon);
  uv_async_send(&state->retiered);
}

static void on_retier(uv_timer_t *timer);

static void on_retiered(uv_async_t *async) {
  main_loop *state = async->data;
  state->retiers = false;
  if (!state->draining)
    uv_timer_start(&state->tiers, on_retier, state->more_tiers ? RETIER_AGAIN_MS : RETIER_EVERY_MS, 0);
  close_ended(state);
}

// The timer is started again when it is done.
static void on_retier(uv_timer_t *timer) {
  main_loop *state = timer->data;
  if (state->draining) return;
  state->retiers = true;
  if (submit(state, retier)) return;
  state->retiers = false;
  uv_timer_start(&state->tiers, on_retier, RETIER_EVERY_MS, 0);
}

static void on_deadline(uv_timer_t *timer) {
  (void)timer;
  qkv_log(QKV_LOG_ERROR, "calls did not end; exiting without them", NULL);
  _exit(EXIT_FAILURE);
}

static void drain(void *context) {
  main_loop *state = context;
  qkv_daemon_drain(state->daemon, state->notice_ms, state->grace_ms);
  uv_async_send(&state->drained);
}

// Nothing is left that sends events to the loop.
static void close_ended(main_loop *state) {
  if (!state->ended || state->learns || state->retiers) return;
  uv_close((uv_handle_t *)&state->drained, NULL);
  uv_close((uv_handle_t *)&state->learnt, NULL);
  uv_close((uv_handle_t *)&state->retiered, NULL);
  uv_close((uv_handle_t *)&state->asked, NULL);
  uv_close((uv_handle_t *)&state->terminate, NULL);
  uv_close((uv_handle_t *)&state->interrupt, NULL);
  uv_close((uv_handle_t *)&state->hangup, NULL);
  uv_close((uv_handle_t *)&state->gauges, NULL);
  uv_close((uv_handle_t *)&state->keep, NULL);
  uv_close((uv_handle_t *)&state->tend, NULL);
  uv_close((uv_handle_t *)&state->learning, NULL);
  uv_close((uv_handle_t *)&state->tiers, NULL);
  uv_close((uv_handle_t *)&state->deadline, NULL);
  uv_close((uv_handle_t *)&state->watchdog, NULL);
}

static void on_drained(uv_async_t *async) {
  main_loop *state = async->data;
  uv_thread_join(&state->drain);
  state->ended = true;
  close_ended(state);
}

// Termination signals are for the main thread alone: every other thread is created while they are blocked.
static void block_signals(bool block) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGHUP);
  pthread_sigmask(block ? SIG_BLOCK : SIG_UNBLOCK, &set, NULL);
}

static void begin_drain(main_loop *state) {
  state->draining = true;
  qkv_service_notify("STOPPING=1");
  const int64_t finish = state->daemon->residency != NULL ? QKV_DAEMON_FINISH_MS : 0;
  uv_timer_start(&state->deadline, on_deadline,
                 (uint64_t)(state->notice_ms + state->grace_ms + finish + DRAIN_SLACK_MS), 0);
  block_signals(true);
  if (uv_thread_create(&state->drain, drain, state) != 0) abort();
  block_signals(false);
}

static void on_signal(uv_signal_t *handle, int number) {
  main_loop *state = handle->data;
  if (state->signalled) {
    qkv_log(QKV_LOG_WARN, "second signal, exiting at once", "{s:i}", "signal", number);
    _exit(EXIT_FAILURE);
  }
  state->signalled = true;
  if (atomic_exchange(&state->chosen, true)) return;  // by Admin.Drain
  state->notice_ms = state->daemon->options->drain_notice;
  state->grace_ms = state->daemon->options->drain_grace;
  qkv_log(QKV_LOG_INFO, "draining", "{s:i, s:I, s:I}", "signal", number, "notice_ms", (json_int_t)state->notice_ms,
          "grace_ms", (json_int_t)state->grace_ms);
  begin_drain(state);
}

static void on_asked(uv_async_t *async) {
  main_loop *state = async->data;
  qkv_log(QKV_LOG_INFO, "draining", "{s:s, s:I, s:I}", "call", "Admin.Drain", "notice_ms",
          (json_int_t)state->notice_ms, "grace_ms", (json_int_t)state->grace_ms);
  begin_drain(state);
}

// Called by a call: the loop exists until no call is left.
static void ask_to_drain(void *context, int64_t notice_ms, int64_t grace_ms) {
  main_loop *state = context;
  if (atomic_exchange(&state->chosen, true)) return;
  state->notice_ms = notice_ms;
  state->grace_ms = grace_ms;
  uv_async_send(&state->asked);
}

static void on_hangup(uv_signal_t *handle, int number) {
  const main_loop *state = handle->data;
  (void)number;
  qkv_daemon_reload(state->daemon, true);
}

// Signals are caught before the daemon says that it is ready.
static void setup_loop(main_loop *state, qkv_daemon *daemon) {
  state->daemon = daemon;
  int failed = uv_loop_init(&state->loop);
  assert(failed == 0);
  (void)failed;
  uv_signal_init(&state->loop, &state->terminate);
  uv_signal_init(&state->loop, &state->interrupt);
  uv_signal_init(&state->loop, &state->hangup);
  uv_async_init(&state->loop, &state->drained, on_drained);
  uv_async_init(&state->loop, &state->learnt, on_learnt);
  uv_async_init(&state->loop, &state->retiered, on_retiered);
  uv_async_init(&state->loop, &state->asked, on_asked);
  uv_timer_init(&state->loop, &state->gauges);
  uv_timer_init(&state->loop, &state->keep);
  uv_timer_init(&state->loop, &state->tend);
  uv_timer_init(&state->loop, &state->learning);
  uv_timer_init(&state->loop, &state->tiers);
  uv_timer_init(&state->loop, &state->deadline);
  uv_timer_init(&state->loop, &state->watchdog);
  state->terminate.data = state->interrupt.data = state->hangup.data = state->gauges.data = state->drained.data =
      state;
  state->keep.data = state->tend.data = state->learning.data = state->learnt.data = state->tiers.data =
      state->retiered.data = state->asked.data = state;
  uv_signal_start(&state->terminate, on_signal, SIGTERM);
  uv_signal_start(&state->interrupt, on_signal, SIGINT);
  uv_signal_start(&state->hangup, on_hangup, SIGHUP);
  uv_timer_start(&state->gauges, on_gauges, 0, GAUGES_EVERY_MS);
  uv_timer_start(&state->keep, on_keep, KEEP_EVERY_MS, KEEP_EVERY_MS);
  uv_timer_start(&state->tend, on_tend, TEND_EVERY_MS, TEND_EVERY_MS);
  uv_timer_start(&state->learning, on_learn, LEARN_EVERY_MS, LEARN_EVERY_MS);
  const uint64_t watchdog = qkv_service_watchdog_ms();
  if (watchdog > 0) uv_timer_start(&state->watchdog, on_watchdog, 0, watchdog);
  on_retier(&state->tiers);
  daemon->drain_context = state;
  atomic_store_explicit(&daemon->drain_asked, ask_to_drain, memory_order_release);
  block_signals(false);
}

static void announce(const qkv_daemon *daemon) {
  for (size_t i = 0; i < daemon->options->listen.count; i++) {
    qkv_log(QKV_LOG_INFO, "listening", "{s:s}", "address", qkv_rpc_server_address(daemon->rpc, i));
  }
  if (daemon->http != NULL)
    qkv_log(QKV_LOG_INFO, "serving HTTP", "{s:s}", "address", qkvi_http_address(daemon->http));
  qkv_log(QKV_LOG_INFO, "ready", "{s:s, s:i, s:s}", "version", QKV_VERSION, "pid", (int)getpid(), "kernels",
          qkv_kernels_get()->name);
  qkv_service_notify("READY=1");
}

static int serve(const qkv_server_options *options, const qkv_options *set) {
  qkv_error error = {0};
  qkv_daemon *daemon = NULL;
  if (qkv_service_setup(&error) != QKV_OK) return refuse(&error);
  if (qkv_daemon_create(options, set, &daemon, &error) != QKV_OK) return refuse(&error);
  main_loop state = {0};
  setup_loop(&state, daemon);
  announce(daemon);
  uv_run(&state.loop, UV_RUN_DEFAULT);
  int failed = uv_loop_close(&state.loop);
  assert(failed == 0);
  (void)failed;
  qkv_daemon_destroy(&daemon);
  qkv_log(QKV_LOG_INFO, "stopped", NULL);
  return EXIT_SUCCESS;
}

int main(int argc, char **argv) {
  block_signals(true);  // until the loop is set up
  signal(SIGPIPE, SIG_IGN);
  qkv_server_options options;
  qkv_options *set = NULL;
  qkv_error error = {0};
  int result = EXIT_SUCCESS;
  if (qkv_server_options_read(argc, argv, &options, &set, &error) != QKV_OK) {
    result = refuse(&error);
    fprintf(stderr, "qkvd --help lists the options\n");
  } else if (options.check_health) {
    if (qkvi_check_health(&options, &error) != QKV_OK) result = refuse(&error);
  } else if (!print_only(&options, set)) {
    qkv_log_setup(stderr, qkv_server_options_log_level(&options));
    raise_file_limit();
    qkvi_memory_setup(options.memory_budget);
    qkv_kernels_setup(qkv_server_options_cpu_mask(&options));
    result = serve(&options, set);
  }
  qkv_options_destroy(&set);
  return result;
}
