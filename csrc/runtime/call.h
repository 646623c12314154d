// One call of the operator: its arguments as plain data, checked and classified.
#pragma once

#include <cstdint>
#include <iosfwd>

#include "api.h"
#include "handle.h"

namespace autofa::runtime {

// Shim codes of the types that occur here.
struct Codes {
  int32_t f32, f16, bf16, f64, boolean, cpu, cuda;
};
extern const Codes codes;

constexpr int kMaxRank = 16;

struct Tensor {
  Handle handle;
  void read();              // fills what follows from the handle
  int64_t sizes[kMaxRank];  // copies: the handle may be handed on before the call ends
  int64_t strides[kMaxRank];
  const void* data = nullptr;
  int64_t rank = 0;
  int32_t dtype = -1;
  int32_t device_type = -1;
  int32_t device_index = -1;

  int64_t size(int64_t from_end) const { return sizes[rank - from_end]; }
};

// Who can answer, as far as shapes and types say.
enum class Route {
  kKernels,  // any kernel: ranks 3 or 4, no broadcast, own dtypes
  kSdpa,     // torch.sdpa alone
  kEmpty,    // nothing to compute: zeros, or no element at all
  kNan,      // the scale is NaN (torch's CPU kernel would give zeros)
};

struct Call {
  Tensor q, k, v, mask;
  bool has_mask = false, causal = false, lower_right = false, gqa = false, has_scale = false;
  double scale = 0;  // as given, or 1/sqrt(head_dim)

  Route route = Route::kSdpa;
  const char* sdpa_only = nullptr;  // why the route is kSdpa
  int64_t out_sizes[kMaxRank];
  int64_t out_strides[kMaxRank];
  // Filled for kKernels, but for the pointers out, lse and workspace.
  autofa_params params;
  uint64_t misalignment = 0;  // bitwise or of all byte addresses and strides
  bool wide = false;

  // Takes over the tensors and the boxed optionals of (query, key, value, attn_mask, is_causal,
  // scale, enable_gqa, lower_right).
  explicit Call(uint64_t* stack);

  // A call without a mask. `given_scale` may be null.
  Call(Handle query, Handle key, Handle value, bool is_causal, const double* given_scale,
       bool enable_gqa);

  bool on_cuda() const { return q.device_type == codes.cuda; }

  // Checks the arguments before anything runs; throws with got / supported / do.
  void inspect();

  // A new tensor of the output's sizes and strides.
  Handle empty_output() const;

  // A new log-sum-exp: f32, contiguous, the output's shape without its last dim.
  Handle empty_lse() const;

  // `result`, copied if its strides are not those every kernel must give.
  Handle with_output_strides(Handle result) const;

  autofa_key key(bool graph, int32_t flags) const;

 private:
  void inspect_any();
  bool is_empty() const;
  void fill_params();
  void fill_output(const int64_t* sizes, int64_t rank);
};

// The strides that every kernel gives an output of these sizes.
void output_strides(const int64_t* query_sizes, const int64_t* query_strides, int64_t query_rank,
                    const int64_t* sizes, int64_t rank, int64_t* strides);

// The shapes, for messages.
std::ostream& operator<<(std::ostream& text, const Tensor& tensor);
std::ostream& operator<<(std::ostream& text, const Call& call);

}  // namespace autofa::runtime
