// Working memory of one thread, kept between calls.
#pragma once

#include <stddef.h>
#include <stdlib.h>

namespace autofa::cpu {

// At least `bytes` bytes, page-aligned, or null when memory is short. Every call on a thread may
// invalidate the block an earlier one returned there; the contents are undefined.
inline void* thread_scratch(size_t bytes) {
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
    ~Block() { free(data); }
  };
  static thread_local Block block;
  if (block.bytes < bytes) {
    constexpr size_t page = 4096;
    const size_t rounded = (bytes + page - 1) / page * page;
    free(block.data);
    block.data = aligned_alloc(page, rounded);
    block.bytes = block.data ? rounded : 0;
  }
  return block.data;
}

}  // namespace autofa::cpu
