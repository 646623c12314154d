// The parts of CUDA that the operator needs, found in what torch has already loaded.
//
// Nothing here links CUDA: where libtorch_cuda is not loaded, every function says so.
#pragma once

#include <cstdint>

namespace autofa::runtime {

// torch's current stream of a device. False where it cannot be told: then nothing may be launched,
// since the null stream is not a substitute (a graph captured with it comes out empty).
bool current_stream(int32_t device_index, void** stream);

// Whether the stream is being captured into a CUDA graph.
bool is_capturing(void* stream);

}  // namespace autofa::runtime
