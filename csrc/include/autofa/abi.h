// The whole contract between the runtime and a compiled variant: plain C data, no torch, no CUDA.
//
// A variant is a shared library that exports the three functions at the end of this file. The
// Python mirror of the two records (autofa/runtime/abi.py) is checked against their sizes.
#ifndef AUTOFA_ABI_H
#define AUTOFA_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define AUTOFA_ABI_VERSION 1
#define AUTOFA_API __attribute__((visibility("default")))

// Element types. F32 is also the name of an accumulation type.
enum { AUTOFA_F32 = 0, AUTOFA_F16 = 1, AUTOFA_BF16 = 2 };

// Which corner the causal triangle hangs on when seqlen_q != seqlen_k.
enum { AUTOFA_CAUSAL_NONE = 0, AUTOFA_CAUSAL_UPPER_LEFT = 1, AUTOFA_CAUSAL_LOWER_RIGHT = 2 };

// Explicit masks; they combine with `causal`.
enum { AUTOFA_MASK_NONE = 0, AUTOFA_MASK_BOOL = 1, AUTOFA_MASK_ADDITIVE = 2 };

// x86-64 micro-architecture levels a CPU variant may be compiled for.
enum { AUTOFA_V3 = 3, AUTOFA_V4 = 4 };

// What autofa_launch returns. A positive value is the CUDA runtime's error code.
enum {
  AUTOFA_OK = 0,
  AUTOFA_REFUSED = -1,    // this variant cannot serve these parameters; nothing was written
  AUTOFA_NO_MEMORY = -2,  // scratch memory could not be had; nothing was written
};

// One attention call. Strides count elements; the head dim always has stride 1.
typedef struct autofa_params {
  uint32_t struct_bytes;  // sizeof(autofa_params) of the caller
  int32_t dtype;          // of q, k, v and out
  int32_t causal;
  int32_t mask;
  int32_t mask_dtype;    // of an additive mask
  int32_t device_index;  // CUDA ordinal; -1 on CPU
  const void* q;         // (batch, heads_q, seqlen_q, head_dim)
  const void* k;         // (batch, heads_kv, seqlen_k, head_dim)
  const void* v;         // (batch, heads_kv, seqlen_k, head_dim_v)
  const void* attn_mask;
  void* out;   // (batch, heads_q, seqlen_q, head_dim_v)
  float* lse;  // null, or (batch, heads_q, seqlen_q) contiguous: natural log, -inf on empty rows
  void* workspace;  // autofa_workspace_bytes() bytes, 256-byte aligned, or null if that is 0
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;  // divides heads_q; query head h reads key head h / (heads_q / heads_kv)
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t q_strides[3];  // batch, head, row
  int64_t k_strides[3];
  int64_t v_strides[3];
  int64_t out_strides[3];
  int64_t mask_strides[4];  // batch, head, query row, key column; 0 where broadcast
  float scale;              // multiplies q.k; any finite value, 0 and negative too
  int32_t reserved;
} autofa_params;

// How a CPU variant gets threads: the signature of libtorch's torch_parallel_for.
typedef void (*autofa_range_fn)(int64_t begin, int64_t end, void* arg);
typedef struct autofa_executor {
  int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, autofa_range_fn fn, void* arg);
  int32_t num_threads;
  int32_t reserved;
} autofa_executor;

// What a library says of itself.
typedef struct autofa_metadata {
  uint32_t abi_version;
  uint32_t params_bytes;    // sizeof(autofa_params) it was compiled with
  const char* slug;         // the variant
  const char* fingerprint;  // of its sources, flags and target
  const char* target;       // sm_90a, x86-64-v4, ...
  const char* compiler;     // first line of the compiler's --version
  int32_t threads;          // per block (CUDA), 0 on CPU
  int32_t smem_bytes;       // dynamic shared memory per block (CUDA), 0 on CPU
} autofa_metadata;

// Enqueues (CUDA, on `stream`) or performs (CPU, `stream` is null) one call. Thread-safe; never
// synchronizes a CUDA stream; allocates no device memory. Returns AUTOFA_OK or one of the above.
AUTOFA_API int32_t autofa_launch(const autofa_params* params, const autofa_executor* executor,
                                 void* stream);

// Device (CUDA) or host (CPU) scratch that the caller provides for one call.
AUTOFA_API int64_t autofa_workspace_bytes(const autofa_params* params);

AUTOFA_API const autofa_metadata* autofa_describe(void);

#ifdef __cplusplus
}
#endif
#endif  // AUTOFA_ABI_H
