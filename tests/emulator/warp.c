/* What the translation of a kernel (translate.py) is compiled with; kernel.h has its sizes.

   A warp runs in lockstep, of lanes that stand at different places those behind first; a block that
   speaks to all lanes waits for all that have not left. Warps take turns of random length, in one
   thread of the host. Global addresses are the host's, shared memory is of the CTA. */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

enum { WENT_ON, NAPPED, WAITS, APART, ENDED, TRAPPED, BAD_ADDRESS, BAD_BARRIER, STUCK, STOPPED };
enum { ALL = 0xffffffff, SHARED = 262144 };

typedef struct {
  u8 *shared;
  u32 turn[16], arrived[16]; /* of the named barriers */
  u32 threads, cta;
  u64 argument;
} Cta;

typedef struct {
  u32 first_thread, waiting, turn;
  u32 at[32];
  u32 w[WORDS][32];
  u64 q[QUADS][32];
  u32 p[PREDICATES];
} Warp;

typedef int Block(Warp *W, Cta *C, u32 m);

#define EACH(lanes) for (u32 l = 0, e_ = (lanes); l < 32; l++) if (e_ >> l & 1)
#define FAIL(status, ...) do { fprintf(stderr, __VA_ARGS__); return status; } while (0)
#define CHECK(a, bytes, least, end, n) \
  if ((a) % (bytes) || (a) < (least) || (a) >= (end)) \
    FAIL(BAD_ADDRESS, "instruction %d of thread %u of CTA %u: address %lx\n", n, W->first_thread + l, C->cta, (long)(a))

static inline void go(Warp *W, u32 lanes, u32 to) { for (int l = 0; l < 32; l++) if (lanes >> l & 1) W->at[l] = to; }
static inline f32 number(u32 bits) { f32 f; memcpy(&f, &bits, 4); return f; }
static inline u32 bits_of(f32 f) { u32 bits; memcpy(&bits, &f, 4); return bits; }
static inline f64 number64(u64 bits) { f64 f; memcpy(&f, &bits, 8); return f; }
static inline u64 bits_of64(f64 f) { u64 bits; memcpy(&bits, &f, 8); return bits; }
static inline f32 flushed(f32 f) { return bits_of(f) & 0x7f800000 ? f : bits_of(f) >> 31 ? -0.0f : 0.0f; }
static inline u32 to_bf16(f32 f) {
  u32 a = bits_of(f);
  return (a & 0x7fffffff) > 0x7f800000 ? 0x7fff : (a + 0x7fff + (a >> 16 & 1)) >> 16;
}
static inline u32 reversed(u32 a) { u32 r = 0; for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i); return r; }
static inline u64 now(void) {
  struct timespec t;
  clock_gettime(CLOCK, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* -- mbarriers: bit 0 the phase, then 15 bits arrivals of a phase, 16 bits still missing, 32 bits
   bytes still missing */
static inline int mbarrier_update(u64 *b, int arrivals, s32 bytes) {
  s32 missing = (s32)(*b >> 16 & 0xffff) - arrivals, still = (s32)(*b >> 32) + bytes;
  u64 phase = *b & 1, count = *b >> 1 & 0x7fff;
  if (missing < 0) FAIL(BAD_BARRIER, "an mbarrier has more arrivals than it expects\n");
  if (!missing && !still) phase ^= 1, missing = count;
  *b = phase | count << 1 | (u64)missing << 16 | (u64)(u32)still << 32;
  return 0;
}

/* -- named barriers: WAITS until all have arrived */
static inline int named_barrier(Warp *W, Cta *C, u32 id, u32 threads, int waits) {
  if (W->waiting) {
    if (C->turn[id] == W->turn) return WAITS;
    W->waiting = 0;
    return WENT_ON;
  }
  W->turn = C->turn[id], C->arrived[id] += 32;
  if (C->arrived[id] > threads) FAIL(BAD_BARRIER, "barrier %u has more arrivals than it expects\n", id);
  if (C->arrived[id] == threads) { C->arrived[id] = 0, C->turn[id]++; return WENT_ON; }
  return waits ? (W->waiting = 1, WAITS) : WENT_ON;
}

/* -- tensor cores: m16n8k16 of bf16, sums in fp32 */
static inline void mma(u32 a[32][4], u32 b[32][2], f32 c[32][4]) {
  f32 A[16][16], B[16][8];
  for (int l = 0; l < 32; l++) {
    int g = l >> 2, t = l & 3;
    for (int i = 0; i < 4; i++) {
      int r = g + 8 * (i & 1), k = 2 * t + 8 * (i >> 1);
      A[r][k] = number(a[l][i] << 16), A[r][k + 1] = number(a[l][i] & 0xffff0000);
    }
    for (int i = 0; i < 2; i++) {
      int k = 2 * t + 8 * i;
      B[k][g] = number(b[l][i] << 16), B[k + 1][g] = number(b[l][i] & 0xffff0000);
    }
  }
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < 16; k++) c[l][i] += A[(l >> 2) + 8 * (i >> 1)][k] * B[k][2 * (l & 3) + (i & 1)];
}

static inline void ldmatrix(u8 *s, u32 at[32], u32 r[32][4], int transposed) {
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++)
      for (int h = 0; h < 2; h++) {
        u16 v;
        memcpy(&v, transposed ? s + at[8 * i + 2 * (l & 3) + h] + 2 * (l >> 2) : s + at[8 * i + (l >> 2)] + 4 * (l & 3) + 2 * h, 2);
        r[l][i] = h ? r[l][i] | (u32)v << 16 : v;
      }
}

/* -- the grid */
#ifdef GRID
extern Block *const blocks[];
extern const u8 speaks_to_all[];

static int run(Warp *W, Cta *C, int turns, int *moved) {
  while (turns-- > 0) {
    s64 last = -1;
    for (int status = APART; status == APART;) {
      u32 at = END, m = 0, left = 0;
      for (int l = 0; l < 32; l++) if ((s64)W->at[l] > last && W->at[l] < at) at = W->at[l];
      if (at == END) return last < 0 ? ENDED : WAITS;
      for (int l = 0; l < 32; l++) m |= (u32)(W->at[l] == at) << l, left |= (u32)(W->at[l] == END) << l;
      last = at;
      if (speaks_to_all[at] && (m | left) != ALL) continue;
      status = blocks[at](W, C, m);
      if (status == WENT_ON || status == NAPPED) *moved = 1;
      if (status > APART || status == WAITS || status == NAPPED) return status;
    }
  }
  return WENT_ON;
}

/* All warps in turn until they have ended (0), or *stop is set, or one has failed. */
int run_grid(u32 ctas, u32 threads, u64 argument, volatile int *stop, u32 seed) {
  u32 n = threads / 32, left = ctas * n;
  Cta *C = calloc(ctas, sizeof(Cta));
  Warp *W = malloc(sizeof(Warp) * left);
  u8 *ended = calloc(left, 1);
  memset(W, 0x5a, sizeof(Warp) * left);
  for (u32 c = 0; c < ctas; c++) {
    C[c] = (Cta){.shared = aligned_alloc(1024, SHARED), .threads = threads, .cta = c, .argument = argument};
    memset(C[c].shared, 0xff, SHARED);
    for (u32 w = 0; w < n; w++) {
      Warp *x = W + c * n + w;
      x->first_thread = 32 * w, x->waiting = x->turn = 0;
      memset(x->at, 0, sizeof x->at);
    }
  }
  int status = 0;
  while (left && !status) {
    int moved = 0, awake = 0;
    for (u32 i = 0; i < ctas * n && !status; i++) {
      if (ended[i]) continue;
      seed = seed * 1103515245u + 12345u;
      int s = run(W + i, C + i / n, 1 + (seed >> 16) % 200, &moved);
      if (s == ENDED) ended[i] = 1, left--;
      else if (s > ENDED) status = s;
      awake += s == WENT_ON;
    }
    if (!status && left && !moved) status = STUCK;
    if (!status && *stop) status = STOPPED;
    if (!awake) usleep(20);
    else if ((seed & 0x3f0000) == 0) sched_yield();
  }
  for (u32 i = 0; status && status != STOPPED && i < ctas * n; i++)
    if (!ended[i]) fprintf(stderr, "CTA %u warp %u: blocks %u .. %u\n", i / n, i % n, W[i].at[0], W[i].at[31]);
  for (u32 c = 0; c < ctas; c++) free(C[c].shared);
  free(C), free(W), free(ended);
  return status;
}
#endif
