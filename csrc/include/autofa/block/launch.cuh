// Host side of a launch: what 16-byte accesses need of the tensors, and large shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "autofa/abi.h"
#include "autofa/block/scheduler.cuh"

namespace autofa {

// Whether every row of a tensor of 16-bit elements starts on a 16-byte boundary. The strides of
// dimensions of size 1 do not matter.
inline bool rows_aligned(const void* tensor, const int64_t (&strides)[3], int64_t batch,
                         int64_t heads, int64_t rows) {
  const int64_t sizes[3] = {batch, heads, rows};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] > 1 && strides[i] % 8 != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
}

// Launches one kernel, of which dynamic shared memory beyond 48 KB is asked for once per device.
// Safe from any number of threads, and under stream capture: nothing here waits for the device.
class KernelLauncher {
 public:
  explicit KernelLauncher(void (*kernel)(autofa_params))
      : entry_(reinterpret_cast<void*>(kernel)) {}

  // On the current device, which is call.device_index. Returns what autofa_launch returns.
  int32_t run(const autofa_params& call, int64_t blocks, int threads, int smem_bytes,
              void* stream) {
    cudaError_t error = opt_in(smem_bytes, call.device_index);
    if (error == cudaSuccess) {
      void* arguments[] = {const_cast<autofa_params*>(&call)};
      error = cudaLaunchKernel(entry_, dim3{static_cast<unsigned>(blocks), 1, 1},
                               dim3{static_cast<unsigned>(threads), 1, 1}, arguments,
                               static_cast<size_t>(smem_bytes), static_cast<cudaStream_t>(stream));
    }
    if (error != cudaSuccess) cudaGetLastError();  // else a later, innocent call would find it
    return static_cast<int32_t>(error);
  }

 private:
  cudaError_t opt_in(int bytes, int device) {
    if (bytes <= 48 * 1024) return cudaSuccess;
    const uint64_t bit = device >= 0 && device < 64 ? uint64_t{1} << device : 0;
    if (granted_.load(std::memory_order_acquire) & bit) return cudaSuccess;
    const cudaError_t error =
        cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) granted_.fetch_or(bit, std::memory_order_release);
    return error;
  }

  const void* entry_;
  std::atomic<uint64_t> granted_{0};
};

// Whether a kernel whose blocks own block_m rows serves a call. `Config` names what it was compiled
// for: dtype, causal, mask, head_dim, block_m, block_n.
template <class Config>
bool serves(const autofa_params& call) {
  constexpr int64_t most = INT32_MAX - 2 * (Config::block_m + Config::block_n);
  const int32_t kind = call.mask_dtype;
  return call.dtype == Config::dtype && call.causal == Config::causal &&
         call.mask == Config::mask && call.head_dim == Config::head_dim &&
         call.head_dim_v == Config::head_dim && call.seqlen_q <= most && call.seqlen_k <= most &&
         (Config::mask != AUTOFA_MASK_ADDITIVE || kind == AUTOFA_F32 || kind == AUTOFA_F16 ||
          kind == AUTOFA_BF16) &&
         BlockWork::count(call, Config::block_m) <= INT32_MAX &&
         rows_aligned(call.q, call.q_strides, call.batch, call.heads_q, call.seqlen_q) &&
         rows_aligned(call.k, call.k_strides, call.batch, call.heads_kv, call.seqlen_k) &&
         rows_aligned(call.v, call.v_strides, call.batch, call.heads_kv, call.seqlen_k) &&
         rows_aligned(call.out, call.out_strides, call.batch, call.heads_q, call.seqlen_q);
}

// What the Kernel<Params> of export.h have in common. `Config` also has threads and smem_bytes.
template <class Config>
struct RowBlockKernel {
  static constexpr int threads = Config::threads;
  static constexpr int smem_bytes = Config::smem_bytes;

  static int64_t workspace_bytes(const autofa_params&) { return 0; }

 protected:
  static int32_t launch_blocks(KernelLauncher& launcher, const autofa_params& call, void* stream) {
    if (!serves<Config>(call)) return AUTOFA_REFUSED;
    const int64_t blocks = BlockWork::count(call, Config::block_m);
    if (blocks == 0) return AUTOFA_OK;
    return launcher.run(call, blocks, threads, smem_bytes, stream);
  }
};

}  // namespace autofa
