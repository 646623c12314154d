// Kernels that try Hopper's instructions, right and with one mistake each; run by
// test_hopper_instructions.py on the emulator. nvcc compiles the same text for the hardware.
#include <cuda_runtime_api.h>

#include "autofa/arch/cluster.cuh"
#include "autofa/arch/mbarrier.cuh"
#include "autofa/arch/proxy_fence.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/tma.cuh"
#include "autofa/arch/warpgroup.cuh"
#include "autofa/arch/wgmma.cuh"
#include "autofa/block/tensor_map.cuh"

namespace autofa::hopper_check {

enum Mistake {
  kNone,
  kNoWaitForCopy,
  kNoWaitForProduct,
  kNoProductFence,
  kEarlyRelease,
  kWrongGroupDistance,
  kOperandsOverwritten,
  kNoProxyFence,
  kTooManyBytesExpected,
  kNoInitFence,
  kWrongParity,
};

constexpr int kKeys = 48, kColumns = 96, kGroups = 2;
constexpr int kLeftBytes = 64 * 128 * kGroups, kRightBytes = kKeys * 128 * kGroups;
constexpr int kBarrier = kLeftBytes + 2 * kRightBytes;  // the copies'; the next one is of releases

struct Call {
  TensorMap q, k, v;
  float* out;  // 64 x 96
  int head, first_row, mistake;
  bool grouped;  // whether a copy brings both groups
};

extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ void load(const Call& call, const TensorMap& map, uint32_t target,
                                     uint32_t barrier, int rows, int first_row) {
  if (call.grouped) return tma_load(target, map, barrier, 0, first_row, 0, call.head, 0);
  for (int group = 0; group < kGroups; ++group) {
    tma_load(target + group * rows * 128, map, barrier, group * 64, first_row, call.head, 0);
  }
}

// out = (q k^T, rounded) v for one head, without a softmax: 64 rows, 48 keys, 96 columns.
__global__ void __launch_bounds__(160) multiply(const __grid_constant__ Call call) {
  const uint32_t left = shared_address(shared), keys = left + kLeftBytes;
  const uint32_t values = keys + kRightBytes, full = left + kBarrier;
  const uint32_t empty = full + kMbarrierBytes;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 4);
    if (call.mistake != kNoInitFence) mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x > 128) return;
    const int more = call.mistake == kTooManyBytesExpected ? 16 : 0;
    mbarrier_arrive_expect(full, kLeftBytes + 2 * kRightBytes + more);
    load(call, call.q, left, full, 64, call.first_row);
    load(call, call.k, keys, full, kKeys, 0);
    load(call, call.v, values, full, kKeys, 0);
    mbarrier_wait(empty, 0);
    mbarrier_arrive_expect(full, kRightBytes);
    load(call, call.v, values, full, kKeys, 1000);  // zeros over what was read
    return;
  }
  if (call.mistake != kNoWaitForCopy) mbarrier_wait(full, call.mistake == kWrongParity ? 1 : 0);
  if (threadIdx.x == 0 && (call.mistake == kNoProxyFence || call.head == 1)) {
    uint32_t words[4];
    load_shared_16(words, left);
    store_shared_16(left, words);
    if (call.mistake != kNoProxyFence) fence_proxy_async();
  }
  named_barrier_sync(1, 128);
  const auto release = [&] {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
  };

  float scores[kKeys / 8][4];
  if (call.mistake != kNoProductFence) wgmma_fence();
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    const int group = k / 4, along = k % 4 * kK16BytesAlongK;
    wgmma_shared<Bf16, Major::k>(
        scores, matrix_descriptor<Major::k>(left + group * 64 * 128) + along,
        matrix_descriptor<Major::k>(keys + group * kKeys * 128) + along, k > 0);
  }
  wgmma_commit();
  if (call.mistake != kNoWaitForProduct) wgmma_wait<0>();
  wgmma_landed(scores);

  uint32_t weights[kKeys / 16][4];
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    weights[i / 4][i % 4] = Bf16::pack(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]);
  }
  float out[kColumns / 8][4];
  const int distance = kKeys * 128 * (call.mistake == kWrongGroupDistance ? 2 : 1);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    wgmma_registers<Bf16, Major::mn>(
        out, weights[k], matrix_descriptor<Major::mn>(values, distance) + k * kK16BytesAcross,
        k > 0);
  }
  wgmma_commit();
  if (call.mistake == kEarlyRelease) release();
  if (call.mistake == kOperandsOverwritten) weights[0][0] = threadIdx.x;
  if (call.mistake == kEarlyRelease) mbarrier_wait(full, 1);
  wgmma_wait<0>();
  wgmma_landed(out);
  if (call.mistake != kEarlyRelease) release();
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = threadIdx.x / 4 % 8 + threadIdx.x / 32 * 16 + i / 2 % 2 * 8;
    call.out[row * kColumns + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = out[i / 4][i % 4];
  }
}

// Each of two blocks sends its numbers to the other, twice through the same buffer.
__global__ void __launch_bounds__(32) swap(const __grid_constant__ Call call) {
  const uint32_t buffer = shared_address(shared), full = buffer + 1024;
  const uint32_t empty = full + kMbarrierBytes;
  const uint32_t peer = cluster_rank() ^ 1;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(full, 32 * 20);
  }
  cluster_sync();
  for (uint32_t round = 0; round < 2; ++round) {
    const uint32_t number = blockIdx.x * 1000 + round * 100 + threadIdx.x;
    const uint32_t words[4] = {number, number + 1, number + 2, number + 3};
    if (round > 0 && call.mistake != kEarlyRelease) mbarrier_wait_cluster(empty, 0);
    const uint32_t there = map_to_rank(full, peer);
    store_async_16(map_to_rank(buffer + threadIdx.x * 16, peer), words, there);
    store_async_4(map_to_rank(buffer + 512 + threadIdx.x * 4, peer), number, there);
    mbarrier_wait_cluster(full, round);
    uint32_t got[4];
    load_shared_16(got, buffer + threadIdx.x * 16);
    const uint32_t one = load_shared_4(buffer + 512 + threadIdx.x * 4);
    const uint32_t sum = got[0] + got[1] + got[2] + got[3] + one;
    call.out[(blockIdx.x * 2 + round) * 32 + threadIdx.x] = static_cast<float>(sum);
    __syncwarp();
    if (threadIdx.x == 0) {
      if (round == 0) mbarrier_arrive_expect(full, 32 * 20);
      mbarrier_arrive_remote(map_to_rank(empty, peer));
    }
  }
  cluster_sync();
}

template <class Kernel>
int32_t launch(Kernel kernel, const Call& call, unsigned blocks, unsigned threads, unsigned ranks) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = ranks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3{blocks, 1, 1};
  config.blockDim = dim3{threads, 1, 1};
  config.dynamicSmemBytes = kBarrier + 64;
  config.attrs = &attribute;
  config.numAttrs = ranks > 1 ? 1 : 0;
  return static_cast<int32_t>(cudaLaunchKernelEx(&config, kernel, call));
}

}  // namespace autofa::hopper_check

using namespace autofa;

// q, k, v: 2 heads of `rows`, `keys` and `keys` rows, `columns` columns, contiguous.
extern "C" AUTOFA_API int32_t check_multiply(const void* q, const void* k, const void* v,
                                             float* out, int64_t rows, int64_t keys,
                                             int64_t columns, int32_t head, int32_t first_row,
                                             int32_t mistake) {
  hopper_check::Call call = {};
  const int64_t q_strides[3] = {7, rows * columns, columns};
  const int64_t strides[3] = {7, keys * columns, columns};
  constexpr int dtype = AUTOFA_BF16, box = hopper_check::kKeys;
  call.grouped = columns % 64 == 0;
  const int groups = call.grouped ? hopper_check::kGroups : 0;
  if (!make_tensor_map(call.q, dtype, {q, q_strides, 1, 2, rows, columns}, 64, groups) ||
      !make_tensor_map(call.k, dtype, {k, strides, 1, 2, keys, columns}, box, groups) ||
      !make_tensor_map(call.v, dtype, {v, strides, 1, 2, keys, columns}, box, groups)) {
    return AUTOFA_REFUSED;
  }
  call.out = out;
  call.head = head;
  call.first_row = first_row;
  call.mistake = mistake;
  return hopper_check::launch(&hopper_check::multiply, call, 1, 160, 1);
}

extern "C" AUTOFA_API int32_t check_swap(float* out, int32_t mistake) {
  hopper_check::Call call = {};
  call.out = out;
  call.mistake = mistake;
  return hopper_check::launch(&hopper_check::swap, call, 4, 32, 2);
}
