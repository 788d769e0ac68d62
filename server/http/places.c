#include "server/http/places.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <utlist.h>

// A connection that has been shut down is ignored.
static void end_longest(qkvi_http_places *places) {
  qkvi_http_place *longest = places->longest;
  if (longest == NULL) return;
  qkvi_http_place_work(longest);
  (void)shutdown(longest->socket, SHUT_RDWR);
  places->ended(places->context);
}

qkvi_http_place *qkvi_http_place_open(qkvi_http_places *places, int socket) {
  qkvi_http_place *place = calloc(1, sizeof *place);
  if (place == NULL) abort();
  place->all = places;
  place->socket = socket;
  if (++places->open > places->most) end_longest(places);
  qkvi_http_place_wait(place);
  return place;
}

void qkvi_http_place_close(qkvi_http_place **place) {
  qkvi_http_place *old = *place;
  if (old == NULL) return;
  *place = NULL;
  qkvi_http_place_work(old);
  old->all->open--;
  free(old);
}

void qkvi_http_place_wait(qkvi_http_place *place) {
  qkvi_http_place_work(place);
  place->waits = true;
  DL_APPEND(place->all->longest, place);
}

void qkvi_http_place_work(qkvi_http_place *place) {
  if (!place->waits) return;
  place->waits = false;
  DL_DELETE(place->all->longest, place);
}
