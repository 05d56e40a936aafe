// Fibers of the threads of a block; see emulator.h.
#include "emulator.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

// Saves what a function has to keep, changes the stack, restores.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

namespace emulator {

static constexpr size_t kStack = 512 << 10, kMemory = 256 << 10;
alignas(65536) static unsigned char memory[kMemory];

struct Copy {
  uint32_t to;
  const void* from;
  int bytes, zeros;
};
struct Fiber {
  void* stack_pointer;
  Place place;
  bool waits = false, done = false;
  std::vector<std::vector<Copy>> copies;  // groups; the last one is open
};
struct Meeting {  // of a warp
  const char* name = nullptr;
  void* lanes[32];
  int arrived = 0, alive = 0;
  std::function<void(void* const*)> work;
};

static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static std::vector<unsigned char*> stacks;
static const std::function<void()>* kernel;
static void* scheduler;
static size_t now = 0;
static int at_barrier = 0, alive = 0, any = 0, any_before = 0;

[[noreturn]] static void stop(const char* what, const char* more = "") {
  std::fprintf(stderr, "emulated kernel: %s %s (block %u %u, thread %u)\n", what, more,
               fibers[now].place.block.x, fibers[now].place.block.y, fibers[now].place.thread.x);
  std::abort();
}

Place& place() {
  return fibers[now].place;
}
unsigned char* dynamic_memory() {
  return memory;
}
uint32_t shared_address(const void* at) {
  return uint32_t(static_cast<const unsigned char*>(at) - memory);
}
void* shared_pointer(uint32_t at) {
  return memory + int32_t(at);
}
void require_full(unsigned mask) {
  if (mask != ~0u) stop("only all lanes of a warp can meet");
}

// To the next fiber that can run.
static void leave() {
  const size_t me = now, n = fibers.size();
  for (size_t i = 1; i <= n; ++i) {
    const size_t next = me + i < n ? me + i : me + i - n;
    if (fibers[next].waits || fibers[next].done) continue;
    if (next == me) return;
    now = next;
    emulator_switch(&fibers[me].stack_pointer, fibers[next].stack_pointer);
    return;
  }
  if (alive > 0) stop("its threads wait for each other");
  emulator_switch(&fibers[me].stack_pointer, scheduler);
}

static void end_meeting(Meeting& m, size_t first) {
  m.work(m.lanes);
  m.arrived = 0, m.name = nullptr;
  for (size_t i = first; i < std::min(first + 32, fibers.size()); ++i)
    if (m.lanes[i - first]) fibers[i].waits = false;
  std::fill(std::begin(m.lanes), std::end(m.lanes), nullptr);
}
void meet_in_warp(const char* name, void* own, const std::function<void(void* const*)>& work) {
  Meeting& m = warps[now / 32];
  if (m.arrived > 0 && std::strcmp(m.name, name) != 0) stop("lanes of a warp meet at", name);
  m.name = name;
  m.lanes[now % 32] = own ? own : &m;
  if (++m.arrived == 1) m.work = work;
  fibers[now].waits = true;
  if (m.arrived == m.alive) end_meeting(m, now / 32 * 32);
  if (fibers[now].waits) leave();
}

static void end_barrier() {
  any_before = any, any = 0, at_barrier = 0;
  for (Fiber& f : fibers) f.waits = false;
}
int meet_in_block_or(int x) {
  if (warps[now / 32].arrived > 0) stop("a barrier of the block while lanes wait for their warp");
  any |= x;
  fibers[now].waits = true;
  if (++at_barrier == alive) end_barrier();
  if (fibers[now].waits) leave();
  return any_before;
}
void meet_in_block() {
  meet_in_block_or(0);
}

void copy_later(uint32_t to, const void* from, int bytes, int zeros) {
  fibers[now].copies.back().push_back({to, from, bytes, zeros});
}
void commit_copies() {
  fibers[now].copies.emplace_back();
}
void finish_copies(int but) {
  auto& groups = fibers[now].copies;
  const size_t keep = but < 0 ? 0 : std::min<size_t>(size_t(but) + 1, groups.size());
  for (size_t i = 0; i + keep < groups.size(); ++i)
    for (const Copy& c : groups[i]) {
      auto* to = static_cast<unsigned char*>(shared_pointer(c.to));
      std::memcpy(to, c.from, size_t(c.bytes));
      std::memset(to + c.bytes, 0, size_t(c.zeros));
    }
  groups.erase(groups.begin(), groups.end() - ptrdiff_t(keep));
  if (groups.empty()) groups.emplace_back();
}

static void enter() {
  (*kernel)();
  Fiber& f = fibers[now];
  f.done = true;
  --alive;
  Meeting& m = warps[now / 32];
  --m.alive;
  if (m.alive > 0 && m.arrived == m.alive) end_meeting(m, now / 32 * 32);
  if (alive > 0 && at_barrier == alive) end_barrier();
  leave();
  std::abort();
}

static void run_block(unsigned threads) {
  std::memset(memory, 0xff, sizeof memory);
  at_barrier = any = 0, alive = int(threads);
  warps.assign((threads + 31) / 32, {});
  for (size_t i = 0; i < warps.size(); ++i) {
    warps[i].alive = int(std::min<size_t>(32, threads - 32 * i));
    std::fill(std::begin(warps[i].lanes), std::end(warps[i].lanes), nullptr);
  }
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.waits = f.done = false;
    f.copies.assign(1, {});
    auto** top = reinterpret_cast<void**>(stacks[i] + kStack);
    std::memset(top - 8, 0, 8 * sizeof(void*));
    top[-2] = reinterpret_cast<void*>(&enter);
    f.stack_pointer = top - 8;
  }
  now = 0;
  emulator_switch(&scheduler, fibers[0].stack_pointer);
}

static int64_t launched = 0;
int64_t launches() {
  return launched;
}

void run(dim3 blocks, unsigned threads, size_t bytes, const std::function<void()>& body) {
  ++launched;
  if (bytes > kMemory) {
    std::fprintf(stderr, "emulated kernel: %zu bytes of shared memory\n", bytes);
    std::abort();
  }
  while (stacks.size() < threads)
    stacks.push_back(static_cast<unsigned char*>(
        mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)));
  kernel = &body;
  for (unsigned z = 0; z < blocks.z; ++z)
    for (unsigned y = 0; y < blocks.y; ++y)
      for (unsigned x = 0; x < blocks.x; ++x) {
        fibers.assign(threads, {});
        for (unsigned i = 0; i < threads; ++i)
          fibers[i].place = {{i, 0, 0}, {x, y, z}, dim3(threads), blocks};
        run_block(threads);
      }
}

}  // namespace emulator

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = what == cudaDevAttrComputeCapabilityMajor         ? 8
           : what == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 << 10
           : what == cudaDevAttrMultiProcessorCount          ? 4
                                                             : 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error of the emulator";
}
