// The index of prefixes against a model that keeps every holder's pages as a list.
#include "engine/cache/prefix_index.h"

#include <pthread.h>

#include "tests/engine/cache/fixture.h"

enum { HOLDERS = 24, DEPTH = 12, PAGES = 3, ROOTS = 2, STEPS = 20000, PAGE = QKV_PREFIX_PAGE, FOUND = 8 };

typedef struct model_holder {
  qkv_prefix_holder place;
  int root;
  size_t count;
  int pages[DEPTH];
} model_holder;

typedef struct scene {
  qkv_prefix_index *index;
  qkv_prefix_hash roots[ROOTS];
  uint32_t ids[PAGES][PAGE];
  model_holder holders[HOLDERS];
  uint64_t seed;
} scene;

static void setup_scene(scene *s, uint64_t pages_max) {
  *s = (scene){.index = qkv_prefix_index_create(pages_max, pages_max), .seed = 7};
  for (int r = 0; r < ROOTS; r++) s->roots[r] = qkv_prefix_root("default", r == 0 ? "a" : "b", NULL, 0);
  for (int p = 0; p < PAGES; p++) {
    for (size_t i = 0; i < PAGE; i++) s->ids[p][i] = (uint32_t)(p * PAGE) + (uint32_t)i;
  }
}

static void check_index(scene *s) {
  const char *reason;
  if (!qkv_prefix_index_validate(s->index, &reason)) fail_msg("%s", reason);
}

static qkv_prefix_hash hash_of(const scene *s, int root, const int *pages, size_t count) {
  qkv_prefix_hash hash = s->roots[root];
  for (size_t i = 0; i < count; i++) hash = qkv_prefix_next(&hash, s->ids[pages[i]]);
  return hash;
}

static bool extend(scene *s, model_holder *h, int page) {
  h->pages[h->count] = page;
  const qkv_prefix_hash hash = hash_of(s, h->root, h->pages, h->count + 1);
  const bool extended = qkv_prefix_index_extend(s->index, h->place, h->count, &hash, NULL);
  h->count += extended;
  return extended;
}

static uint32_t owner_of(const scene *s, const model_holder *h) {
  return (uint32_t)(h - s->holders);
}

static void attach(scene *s, model_holder *h, int root) {
  *h = (model_holder){.place = qkv_prefix_index_attach(s->index, &s->roots[root], owner_of(s, h), &s->roots[root]),
                      .root = root};
}

static void drop(scene *s, model_holder *h) {
  qkv_prefix_index_drop(s->index, h->place);
  h->place = 0;
}

static void shorten(scene *s, model_holder *h, size_t pages) {
  qkv_prefix_index_shorten(s->index, h->place, pages);
  if (h->count > pages) h->count = pages;
}

static void fork_holder(scene *s, const model_holder *of, model_holder *h, size_t pages) {
  *h = *of;
  h->place = qkv_prefix_index_fork(s->index, of->place, pages, owner_of(s, h));
  if (h->count > pages) h->count = pages;
}

static size_t shared(const model_holder *h, int root, const int *pages, size_t count) {
  size_t same = 0;
  if (h->place == 0 || h->root != root) return 0;
  while (same < h->count && same < count && h->pages[same] == pages[same]) same++;
  return same;
}

static size_t match(scene *s, int root, const int *pages, size_t count, size_t ids, qkv_prefix_found *found) {
  uint32_t list[DEPTH * PAGE];
  for (size_t i = 0; i < count; i++) memcpy(list + i * PAGE, s->ids[pages[i]], sizeof s->ids[0]);
  return qkv_prefix_index_match(s->index, &s->roots[root], list, ids, NULL, found, FOUND);
}

// What is found is the longest there is, shares what it says, is found once, and is all as far as there is space.
static void check_match(scene *s) {
  int pages[DEPTH], root = (int)random_below(&s->seed, ROOTS);
  const size_t count = random_below(&s->seed, DEPTH + 1);
  for (size_t i = 0; i < count; i++) pages[i] = (int)random_below(&s->seed, PAGES);
  const model_holder *like = &s->holders[random_below(&s->seed, HOLDERS)];
  if (random_below(&s->seed, 2) == 0) memcpy(pages, like->pages, random_below(&s->seed, count + 1) * sizeof *pages);
  size_t best = 0, sharing = 0;
  for (size_t i = 0; i < HOLDERS; i++) {
    const size_t same = shared(&s->holders[i], root, pages, count);
    if (same > best) best = same;
    sharing += same > 0;
  }
  qkv_prefix_found found[FOUND];
  const size_t found_count = match(s, root, pages, count, count * PAGE, found);
  assert_int_equal(found_count, sharing < FOUND ? sharing : FOUND);
  if (best > 0) assert_int_equal(found[0].pages, best);
  for (size_t i = 0; i < found_count; i++) {
    assert_int_equal(shared(&s->holders[found[i].owner], root, pages, count), found[i].pages);
    if (i > 0) assert_true(found[i].pages <= found[i - 1].pages);
    for (size_t j = 0; j < i; j++) assert_int_not_equal(found[i].owner, found[j].owner);
  }
}

static void step(scene *s) {
  model_holder *h = &s->holders[random_below(&s->seed, HOLDERS)], *of = &s->holders[random_below(&s->seed, HOLDERS)];
  const size_t what = random_below(&s->seed, 10), pages = random_below(&s->seed, DEPTH + 1);
  if (h->place == 0 && of->place != 0 && what < 5) {
    fork_holder(s, of, h, pages);
  } else if (h->place == 0) {
    attach(s, h, (int)random_below(&s->seed, ROOTS));
  } else if (what == 0) {
    drop(s, h);
  } else if (what == 1) {
    shorten(s, h, pages);
  } else if (h->count < DEPTH) {
    assert_true(extend(s, h, (int)random_below(&s->seed, PAGES)));
  }
}

// Distinct pages of all holders.
static size_t count_pages(const scene *s) {
  static qkv_prefix_hash seen[HOLDERS * DEPTH];
  size_t count = 0;
  for (size_t i = 0; i < HOLDERS; i++) {
    for (size_t p = 1; s->holders[i].place != 0 && p <= s->holders[i].count; p++) {
      const qkv_prefix_hash hash = hash_of(s, s->holders[i].root, s->holders[i].pages, p);
      size_t at = 0;
      while (at < count && !qkv_prefix_hash_equal(&seen[at], &hash)) at++;
      if (at == count) seen[count++] = hash;
    }
  }
  return count;
}

static bool add_page(void *context, const qkv_prefix_page *page) {
  size_t *sums = context;
  sums[0]++;
  sums[1] += page->holders;
  return true;
}

static void random_steps_are_as_in_the_model(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 1000);
  for (int i = 0; i < STEPS; i++) {
    step(&s);
    check_match(&s);
    if (i % 16 != 0) continue;
    check_index(&s);
    assert_int_equal(qkv_prefix_index_read(s.index).pages, count_pages(&s));
    size_t sums[2] = {0}, holders = 0;
    qkv_prefix_index_each(s.index, add_page, sums);
    for (size_t h = 0; h < HOLDERS; h++) {
      holders += s.holders[h].place != 0 && s.holders[h].count > 0;
      if (s.holders[h].place != 0)
        assert_int_equal(qkv_prefix_index_pages(s.index, s.holders[h].place), s.holders[h].count);
    }
    assert_int_equal(sums[0], count_pages(&s));
    assert_int_equal(sums[1], holders);
  }
  for (size_t h = 0; h < HOLDERS; h++) drop(&s, &s.holders[h]);
  assert_int_equal(qkv_prefix_index_read(s.index).pages, 0);
  assert_int_equal(qkv_prefix_index_read(s.index).holders, 0);
  check_index(&s);
  qkv_prefix_index_destroy(&s.index);
  assert_null(s.index);
}

static void roots_differ_by_tenant_model_and_salt(void **state) {
  (void)state;
  const qkv_prefix_hash roots[] = {
      qkv_prefix_root("a", "b", NULL, 0),   qkv_prefix_root("b", "a", NULL, 0), qkv_prefix_root("ab", "c", NULL, 0),
      qkv_prefix_root("a", "bc", NULL, 0),  qkv_prefix_root("a", "b", "c", 1),  qkv_prefix_root("a", "b", "\0", 1),
      qkv_prefix_root("a", "b", "\0\0", 2), qkv_prefix_root("a", "b", "cd", 2),
  };
  for (size_t i = 0; i < sizeof roots / sizeof *roots; i++) {
    for (size_t j = 0; j < i; j++) assert_false(qkv_prefix_hash_equal(&roots[i], &roots[j]));
  }
  const qkv_prefix_hash again = qkv_prefix_root("a", "b", "cd", 2);
  assert_true(qkv_prefix_hash_equal(&again, &roots[7]));
}

// They go to the disk: the same for ever.
static void hashes_stay_as_they_are(void **state) {
  (void)state;
  uint32_t ids[PAGE];
  for (uint32_t i = 0; i < PAGE; i++) ids[i] = i * 1000003;
  const qkv_prefix_hash root = qkv_prefix_root("default", "tinylm", "salt", 4), page = qkv_prefix_next(&root, ids);
  assert_int_equal(root.low, 0x82c0da72311d45e4);
  assert_int_equal(root.high, 0x2318900d0a2bdb2d);
  assert_int_equal(page.low, 0xb1edfe75267339c3);
  assert_int_equal(page.high, 0x5b11267049e63ca9);
}

static void the_latest_comes_first(void **state) {
  (void)state;
  scene s;
  qkv_prefix_found found[FOUND];
  const int pages[] = {0, 1, 2};
  setup_scene(&s, 100);
  for (int i = 0; i < 3; i++) {  // 0 1, each behind the one before
    attach(&s, &s.holders[i], 0);
    assert_true(extend(&s, &s.holders[i], 0) && extend(&s, &s.holders[i], 1));
  }
  assert_true(extend(&s, &s.holders[1], 0));  // 0 1 0
  assert_int_equal(match(&s, 0, pages, 3, 3 * PAGE, found), 3);
  assert_int_equal(found[0].owner, 2);
  assert_int_equal(found[1].owner, 0);
  assert_int_equal(found[2].owner, 1);
  // A page that is not asked for as a whole does not count.
  assert_int_equal(match(&s, 0, pages, 3, 2 * PAGE - 1, found), 3);
  assert_int_equal(found[0].pages, 1);
  assert_int_equal(found[0].owner, 1);  // came through last
  drop(&s, &s.holders[1]);
  assert_int_equal(match(&s, 0, pages, 3, PAGE, found), 2);
  assert_int_equal(found[0].owner, 2);
  assert_int_equal(match(&s, 0, pages, 3, PAGE - 1, found), 0);
  qkv_prefix_index_destroy(&s.index);
}

static void a_full_index_refuses_and_counts(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 4);  // a root and three pages
  attach(&s, &s.holders[0], 0);
  for (int i = 0; i < 3; i++) assert_true(extend(&s, &s.holders[0], 0));
  assert_false(extend(&s, &s.holders[0], 0));
  attach(&s, &s.holders[1], 1);
  assert_int_equal(s.holders[1].place, 0);
  assert_int_equal(qkv_prefix_index_read(s.index).refused, 2);
  attach(&s, &s.holders[2], 0);
  assert_true(extend(&s, &s.holders[2], 0));  // is there
  assert_false(extend(&s, &s.holders[2], 1));
  check_index(&s);
  shorten(&s, &s.holders[0], 1);
  assert_true(extend(&s, &s.holders[2], 1));
  // Page 2 of a holder that has one page leaves a gap.
  const qkv_prefix_hash hash = hash_of(&s, 0, (int[]){0, 0, 0}, 3);
  assert_false(qkv_prefix_index_extend(s.index, s.holders[0].place, 2, &hash, NULL));
  check_index(&s);
  const uint64_t bytes = qkv_prefix_index_read(s.index).bytes;
  for (int i = 0; i < 100; i++) {
    shorten(&s, &s.holders[2], 1);
    assert_true(extend(&s, &s.holders[2], i % PAGES));
  }
  assert_int_equal(qkv_prefix_index_read(s.index).bytes, bytes);
  qkv_prefix_index_destroy(&s.index);
}

// Each root is another tenant's.
static void a_tenant_leaves_a_part(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 8);
  qkv_prefix_index_destroy(&s.index);
  s.index = qkv_prefix_index_create(8, 6);
  for (int round = 0; round < 3; round++) {
    attach(&s, &s.holders[0], 0);
    for (int i = 0; i < 5; i++) assert_true(extend(&s, &s.holders[0], 0));
    assert_false(extend(&s, &s.holders[0], 0));
    attach(&s, &s.holders[1], 1);
    assert_true(extend(&s, &s.holders[1], 0));
    assert_false(extend(&s, &s.holders[1], 0));  // all are taken
    check_index(&s);
    assert_int_equal(qkv_prefix_index_read(s.index).refused, 2 * round + 2);
    shorten(&s, &s.holders[0], 4);
    assert_true(extend(&s, &s.holders[1], 0));
    drop(&s, &s.holders[0]);
    drop(&s, &s.holders[1]);
    check_index(&s);
  }
  qkv_prefix_index_destroy(&s.index);
}

static void no_pages_no_matches(void **state) {
  (void)state;
  scene s;
  qkv_prefix_found found[FOUND];
  setup_scene(&s, 0);
  attach(&s, &s.holders[0], 0);
  assert_int_equal(s.holders[0].place, 0);
  assert_false(extend(&s, &s.holders[0], 0));
  assert_int_equal(match(&s, 0, (int[]){0}, 1, PAGE, found), 0);
  qkv_prefix_index_destroy(&s.index);
}

// ---- Threads ----

typedef struct worker {
  scene *all;
  uint64_t seed;
  _Atomic int taken;
  pthread_t thread;
} worker;

static worker workers[4];

static void take(uint32_t owner) {
  atomic_fetch_add(&workers[owner].taken, 1);
}

static void *work(void *context) {
  worker *own = context;
  uint32_t list[DEPTH * PAGE];
  for (int round = 0; round < 300; round++) {
    qkv_prefix_found found[FOUND];
    qkv_prefix_hash hash = own->all->roots[0];
    const qkv_prefix_holder at = qkv_prefix_index_attach(own->all->index, &hash, (uint32_t)(own - workers), NULL);
    const size_t count = 1 + random_below(&own->seed, DEPTH);
    for (size_t i = 0; i < count; i++) {
      memcpy(list + i * PAGE, own->all->ids[random_below(&own->seed, PAGES)], sizeof own->all->ids[0]);
      hash = qkv_prefix_next(&hash, list + i * PAGE);
      assert_true(qkv_prefix_index_extend(own->all->index, at, i, &hash, NULL));
    }
    const size_t found_count =
        qkv_prefix_index_match(own->all->index, &own->all->roots[0], list, count * PAGE, take, found, FOUND);
    assert_true(found_count > 0 && found[0].pages == count);
    qkv_prefix_index_drop(own->all->index, at);
  }
  return NULL;
}

static void threads_match_what_they_hold(void **state) {
  (void)state;
  scene s;
  int taken = 0;
  setup_scene(&s, 1000);
  for (size_t i = 0; i < 4; i++) {
    workers[i] = (worker){.all = &s, .seed = i};
    assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
  }
  for (size_t i = 0; i < 4; i++) assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
  for (size_t i = 0; i < 4; i++) taken += workers[i].taken;
  assert_true(taken >= 4 * 300);
  check_index(&s);
  assert_int_equal(qkv_prefix_index_read(s.index).pages, 0);
  qkv_prefix_index_destroy(&s.index);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(random_steps_are_as_in_the_model),
      cmocka_unit_test(roots_differ_by_tenant_model_and_salt),
      cmocka_unit_test(hashes_stay_as_they_are),
      cmocka_unit_test(the_latest_comes_first),
      cmocka_unit_test(a_full_index_refuses_and_counts),
      cmocka_unit_test(a_tenant_leaves_a_part),
      cmocka_unit_test(no_pages_no_matches),
      cmocka_unit_test(threads_match_what_they_hold),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
