// The C surface of the runtime library, spoken by autofa/runtime/extension.py through ctypes.
//
// The operators (op.cpp) read a table from keys to kernel ids; these functions fill it. All of them
// are thread-safe. Ids are process-wide: 0 is torch.sdpa, others come from autofa_add_*.
#pragma once

#include <stdint.h>

#include "autofa/abi.h"

extern "C" {

// What a call is looked up by: sizes as buckets (nearest power of two), never exact lengths.
typedef struct autofa_key {
  int32_t device_type;   // 0 cpu, 1 cuda
  int32_t device_index;  // CUDA ordinal; on CPU the number of threads torch uses
  int32_t dtype;         // abi.h
  int32_t mask;          // index into problem.MASKS
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t group;  // query heads per key head
  int32_t batch;  // this and the following three: buckets
  int32_t heads_kv;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t aligned;  // 1: base pointers and row, head and batch strides are multiples of 16 bytes
  int32_t wide;     // 1: some element offset needs 64 bits
  int32_t graph;    // 1: the stream is being captured
  int32_t flags;    // process-wide: bit 0 deterministic, bit 1 precision "fast"
} autofa_key;

// Which kernel answers for a key that is not in the table. Its answer is stored; a negative one
// means torch.sdpa, for this call only. Called without a lock held, by any number of threads.
typedef int64_t (*autofa_miss_fn)(const autofa_key* key);

// What autofa_counters counts.
enum {
  AUTOFA_COUNT_OWN = 0,       // calls served by a variant
  AUTOFA_COUNT_VENDOR = 1,    // by a vendor kernel, torch.sdpa included
  AUTOFA_COUNT_FALLBACK = 2,  // by torch.sdpa, because the kernel could not serve this very call
  AUTOFA_COUNT_MISS = 3,      // keys that were not in the table
  AUTOFA_COUNTERS = 4,
};

AUTOFA_API void autofa_set_miss(autofa_miss_fn fn);  // null: a miss is torch.sdpa

// Loads a variant library and returns its id (the same one for the same file); -1 with the reason
// in `error` if it cannot be loaded, speaks another ABI or is not the variant `slug`. `alignment`:
// bytes that its base pointers and strides must be multiples of.
AUTOFA_API int64_t autofa_add_library(const char* path, const char* slug, int32_t alignment,
                                      char* error, int64_t error_bytes);
AUTOFA_API int64_t autofa_add_vendor(const char* slug);  // -1: unknown

AUTOFA_API void autofa_table_set(const autofa_key* key, int64_t id);  // a negative id removes
AUTOFA_API int64_t autofa_table_get(const autofa_key* key);           // -1: absent
AUTOFA_API void autofa_table_clear(void);
AUTOFA_API void autofa_set_flags(int32_t flags);
AUTOFA_API int32_t autofa_get_flags(void);
AUTOFA_API int64_t autofa_counters(int32_t which);
AUTOFA_API int64_t autofa_bucket(int64_t n);  // key.h's nearest_power_of_two
AUTOFA_API int64_t
autofa_sizeof(int32_t which);  // 0 autofa_params, 1 _metadata, 2 _key, 3 _executor
AUTOFA_API const char* autofa_version(void);

// python_face.h, with Python's objects as pointers; to be called with the interpreter's lock held.
AUTOFA_API void* autofa_face_open(void* objects, int64_t payload);
AUTOFA_API void autofa_face_watch(void);
AUTOFA_API void autofa_face_forget(void);
AUTOFA_API void autofa_face_remember(void* query, void* key, void* value, int32_t causal,
                                     int32_t gqa, int32_t trains, int32_t sdpa);
AUTOFA_API void autofa_face_remember_query(void* query);
}
