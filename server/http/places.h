// Which HTTP connection is closed where all places are taken: the one that has waited longest for its client, so that
// slow senders and readers block no others. A new connection always finds a place among the spare ones, and is served
// unless as many others come before it has sent its request.
//
// Threads: all of it on the one thread of the HTTP server whose connections they are.
#ifndef QKV_SERVER_HTTP_PLACES_H
#define QKV_SERVER_HTTP_PLACES_H

#include <stdbool.h>
#include <stddef.h>

typedef struct qkvi_http_place {
  struct qkvi_http_places *all;
  int socket;
  bool waits;                           // for its client
  struct qkvi_http_place *prev, *next;  // of those that do, in the order of time
} qkvi_http_place;

typedef struct qkvi_http_places {
  qkvi_http_place *longest;
  size_t open, most;  // connections; beyond `most` one is closed for each new one
  void (*ended)(void *context);
  void *context;
} qkvi_http_places;

// A new connection, which waits for its client's request. Another one may be shut down for it; the server then sees
// that one end.
qkvi_http_place *qkvi_http_place_open(qkvi_http_places *places, int socket);
void qkvi_http_place_close(qkvi_http_place **place);

// The connection begins to wait for its client, or begins anew; or it waits for the daemon.
void qkvi_http_place_wait(qkvi_http_place *place);
void qkvi_http_place_work(qkvi_http_place *place);

#endif
