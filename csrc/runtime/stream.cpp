#include "stream.h"

#include "symbols.h"

namespace autofa::runtime {
namespace {

using CurrentStream = int32_t (*)(int32_t, void**);  // AOTITorchError
using IsCapturing = int32_t (*)(void*, int32_t*);    // CUresult, CUstreamCaptureStatus

}  // namespace

bool current_stream(int32_t device_index, void** stream) {
  static const auto get = reinterpret_cast<CurrentStream>(
      symbol_of("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"));
  return get != nullptr && get(device_index, stream) == 0;
}

bool is_capturing(void* stream) {
  static const auto query =
      reinterpret_cast<IsCapturing>(symbol_of("libcuda.so.1", "cuStreamIsCapturing"));
  int32_t status = 0;
  // An error means that another stream is being captured, which this one would disturb: not ours.
  return query != nullptr && query(stream, &status) == 0 && status == 1;
}

}  // namespace autofa::runtime
