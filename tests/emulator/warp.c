/* What the translation of a kernel (translate.py) is compiled with: its registers and its code are
   in "kernel.h", which this file includes twice.

   A warp executes in lockstep, of lanes that stand at different places those behind first. The
   kernel's warps take turns of random length, in one thread of the host. Addresses are the host's. */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;

#define DECLARATIONS
#include "kernel.h"
#undef DECLARATIONS

enum { RUNNING, ENDED, NAPPED, TRAPPED, BAD_ADDRESS, PART_OF_A_WARP, STOPPED };

typedef struct {
  u32 lanes, first_thread, cta, all;
  u64 argument;
  u32 at[32];
  u32 w[WORDS][32];
  u64 q[QUADS][32];
  u32 p[PREDICATES];
} Warp;

static float number(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
static u32 bits_of(float f) { u32 bits; memcpy(&bits, &f, 4); return bits; }
static u32 reversed(u32 a) { u32 r = 0; for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i); return r; }
static u64 now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void go(Warp *W, u32 lanes, u32 to) { for (int l = 0; l < 32; l++) if (lanes >> l & 1) W->at[l] = to; }

#define EACH(lanes) for (u32 l = 0, e_ = (lanes); l < 32; l++) if (e_ >> l & 1)
#define WHOLE(n) if (W->lanes == 32 && m != W->all) { fprintf(stderr, "instruction %d by part of a warp: %x\n", n, m); return PART_OF_A_WARP; }
#define CHECK(a, size, n) if ((a) < 4096 || (a) % (size)) { fprintf(stderr, "instruction %d: address %lx\n", n, (long)(a)); return BAD_ADDRESS; }

static int run(Warp *W, int turns) {
  for (; turns > 0; turns--) {
    u32 at = END, m = 0;
    for (int l = 0; l < 32; l++) if (W->at[l] < at) at = W->at[l];
    if (at == END) return ENDED;
    for (int l = 0; l < 32; l++) m |= (u32)(W->at[l] == at) << l;
    switch (at) {
#include "kernel.h"
    }
  }
  return RUNNING;
}

int warp_bytes(void) { return sizeof(Warp); }

void start(Warp *W, u32 lanes, u32 first_thread, u32 cta, u64 argument) {
  memset(W, 0x5a, sizeof *W);
  W->lanes = lanes, W->first_thread = first_thread, W->cta = cta, W->argument = argument;
  W->all = lanes == 32 ? ~0u : (1u << lanes) - 1;
  for (u32 l = 0; l < 32; l++) W->at[l] = l < lanes ? 0 : END;
}

/* All warps in turn until they have ended (0), or *stop is set, or one has failed. */
int run_all(Warp **warps, int n, volatile int *stop, u32 seed) {
  char ended[1024] = {0};
  for (;;) {
    int live = 0, awake = 0;
    for (int i = 0; i < n; i++) {
      if (ended[i]) continue;
      live++;
      seed = seed * 1103515245u + 12345u;
      int status = run(warps[i], 1 + (seed >> 16) % 2000);
      if (status > NAPPED) return status;
      ended[i] = status == ENDED;
      awake += status == RUNNING;
    }
    if (!live) return 0;
    if (*stop) return STOPPED;
    if (!awake) usleep(20);
    else if ((seed & 0x3f0000) == 0) sched_yield();
  }
}
