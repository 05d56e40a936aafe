#include "attn/exec/large.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "core/check.h"

namespace horner::attn::exec {

namespace {

constexpr size_t kPage = 2 << 20, kLarge = 4 << 20, kMostKept = 1 << 30;

struct Block {
  void* at;
  size_t size;
};

// The blocks that nobody uses, the one freed last at the end.
class FreeBlocks {
 public:
  Block take(size_t size) {
    {
      const std::lock_guard lock(mutex_);
      const auto fits = [&](const Block& b) { return b.size >= size && b.size - size <= size / 8; };
      const auto last = std::find_if(blocks_.rbegin(), blocks_.rend(), fits);
      if (last != blocks_.rend()) {
        const Block b = *last;
        blocks_.erase(std::next(last).base());
        kept_ -= b.size;
        return b;
      }
    }
    return from_system(size);
  }

  void give(Block b) {
    const std::lock_guard lock(mutex_);
    blocks_.push_back(b), kept_ += b.size;
    for (; kept_ > kMostKept; blocks_.erase(blocks_.begin())) {
      kept_ -= blocks_.front().size;
      munmap(blocks_.front().at, blocks_.front().size);
    }
  }

 private:
  // Begins at a page of 2 MB: what lies before the first one and after the last is given back.
  static Block from_system(size_t size) {
    const size_t pages = (size + kPage - 1) / kPage * kPage, all = pages + kPage;
    void* p = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(p != MAP_FAILED, "not enough memory for a tensor of ", size >> 20, " MB");
    const auto begin = reinterpret_cast<uintptr_t>(p);
    const uintptr_t at = (begin + kPage - 1) / kPage * kPage, rest = begin + all - (at + pages);
    if (at > begin) munmap(p, at - begin);
    if (rest) munmap(reinterpret_cast<void*>(at + pages), rest);
    const Block b{reinterpret_cast<void*>(at), pages};
#ifdef MADV_HUGEPAGE
    madvise(b.at, b.size, MADV_HUGEPAGE);
#endif
    return b;
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;
  size_t kept_ = 0;
};

FreeBlocks& free_blocks() {
  static auto* blocks = new FreeBlocks;  // tensors may be freed after main
  return *blocks;
}

struct LargeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size < kLarge) return c10::GetAllocator(at::kCPU)->allocate(size);
    auto* block = new Block(free_blocks().take(size));
    report(*block, int64_t(block->size));
    const auto give = [](void* p) {
      const std::unique_ptr<Block> block(static_cast<Block*>(p));
      report(*block, -int64_t(block->size));
      free_blocks().give(*block);
    };
    return {block->at, block, give, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }

 private:
  static void report(Block b, int64_t bytes) {  // as torch's allocator does
    if (c10::memoryProfilingEnabled())
      c10::reportMemoryUsageToProfiler(b.at, bytes, 0, 0, at::kCPU);
  }
};

}  // namespace

at::Tensor large_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  static LargeAllocator allocator;
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

static at::Tensor joined(at::TensorList parts, int64_t axis) {
  std::vector<int64_t> sizes = parts[0].sizes().vec();
  sizes[size_t(axis)] = 0;
  for (const at::Tensor& x : parts) sizes[size_t(axis)] += x.size(axis);
  at::Tensor y = large_empty(sizes, parts[0].options());
  return at::cat_out(y, parts, axis);
}

TensorVector parts(std::string_view execution, const at::Tensor& x, int64_t length, int64_t axis) {
  const TensorVector inputs{x};
  if (!needs_gradients(inputs)) return x.split(length, axis);
  const size_t n = size_t((x.size(axis) + length - 1) / length);
  const auto split = [&] { return std::pair(TensorVector(x.split(length, axis)), TensorVector()); };
  const auto join = [axis](at::TensorList, at::TensorList, at::TensorList grads) {
    return TensorVector{joined(grads, axis)};
  };
  return record({execution, inputs, n, 0, true, split, join});
}

}  // namespace horner::attn::exec
