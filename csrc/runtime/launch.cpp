// The hot path: key, table, launch; and the two ways to end when a kernel refuses.
#include "launch.h"

#include <atomic>

#include "guard.h"
#include "stream.h"
#include "table.h"

namespace autofa::runtime {
namespace {

std::atomic<autofa_miss_fn> miss_callback{nullptr};
std::atomic<int32_t> process_flags{0};
std::atomic<int64_t> counters[AUTOFA_COUNTERS];

void count(int which) { counters[which].fetch_add(1, std::memory_order_relaxed); }

int32_t parallel_for(int64_t begin, int64_t end, int64_t grain, autofa_range_fn fn, void* arg) {
  return torch_parallel_for(begin, end, grain, fn, arg);
}

autofa_executor executor() {
  uint32_t threads = 1;
  check(torch_get_num_threads(&threads), "reading the number of threads");
  return {parallel_for, static_cast<int32_t>(threads), 0};
}

// CUDA errors that a launch returns before anything ran and that leave the context usable: invalid
// value, out of memory, invalid configuration, insufficient driver, invalid device function, no
// kernel image, invalid handle, launch out of resources.
bool is_refusal(int32_t code) {
  switch (code) {
    case 1:
    case 2:
    case 9:
    case 35:
    case 98:
    case 209:
    case 400:
    case 701:
      return true;
    default:
      return code < 0;
  }
}

// A bit that is there already costs no write, which other threads would wait for.
void note(std::atomic<uint64_t>& bits, uint64_t bit) {
  if ((bits.load(std::memory_order_relaxed) & bit) == 0) bits.fetch_or(bit);
}

struct Place {
  void* stream = nullptr;
  bool known = true;  // on CUDA: whether the stream could be told
  bool capturing = false;
};

Place place_of(const Call& call) {
  Place place;
  if (!call.on_cuda()) return place;
  place.known = current_stream(call.q.device_index, &place.stream);
  place.capturing = place.known && is_capturing(place.stream);
  return place;
}

// Launches a variant. An empty handle means that it refused, `why` with what reason.
Handle launch(Call& call, const Kernel& kernel, const Place& place, Handle* lse, const char*& why) {
  autofa_params& params = call.params;
  if (!place.known) {
    why = "this torch does not tell its CUDA stream";
    return {};
  }
  // A first launch loads the kernel onto its device; CUDA ends a capture for that, with error 901.
  const uint64_t here = uint64_t{1} << (call.q.device_index & 63);
  if (place.capturing && (kernel.launched.load(std::memory_order_relaxed) & here) == 0) {
    why = "its first launch on a device may not be captured: call it once before, or warmup()";
    return {};
  }
  const uint64_t row_bytes = params.head_dim_v * (params.dtype == AUTOFA_F32 ? 4 : 2);
  if ((call.misalignment | row_bytes) & kernel.alignment_mask) {
    why = "base pointers or strides are not aligned as it needs";
    return {};
  }
  const DeviceGuard guard(call);
  Handle out = call.empty_output();
  check(aoti_torch_get_data_ptr(out.get(), &params.out), "reading the output's address");
  if (lse != nullptr) {
    *lse = call.empty_lse();
    void* data;
    check(aoti_torch_get_data_ptr(lse->get(), &data), "reading its address");
    params.lse = static_cast<float*>(data);
  }
  Handle workspace;
  if (const int64_t bytes = kernel.workspace_bytes(&params)) {
    const int64_t stride = 1;
    check(aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(), call.q.device_type,
                                   call.q.device_index, workspace.receive()),
          "allocating the workspace");
    check(aoti_torch_get_data_ptr(workspace.get(), &params.workspace), "reading its address");
  }
  const autofa_executor threads = executor();
  const int32_t code = kernel.launch(&params, &threads, place.stream);
  if (code == AUTOFA_OK) {
    count(AUTOFA_COUNT_OWN);
    if (call.on_cuda()) note(kernel.launched, here);
    return out;
  }
  require(is_refusal(code), kernel.slug, ": got CUDA error ", code,
          " from its launch; supported: a working CUDA context; restart the process");
  why = code == AUTOFA_REFUSED     ? "it does not serve these sizes or strides"
        : code == AUTOFA_NO_MEMORY ? "it got no scratch memory"
                                   : "CUDA refused the launch";
  return {};
}

bool is_constant(const Call& call) {
  return call.route == Route::kEmpty || call.route == Route::kNan;
}

Handle constant(const Call& call) {
  Handle out = call.empty_output();
  check(aoti_torch_zero_(out.get()), "filling the output");
  return call.route == Route::kNan ? times_nan(std::move(out)) : std::move(out);
}

Handle sdpa(Call& call) {
  count(AUTOFA_COUNT_VENDOR);
  return run_vendor(*kernel_of(kSdpaId)->vendor, call);
}

Handle fall_back(Call& call) {
  count(AUTOFA_COUNT_FALLBACK);
  return sdpa(call);
}

autofa_key key_of(const Call& call, const Place& place) {
  const int32_t flags = process_flags.load(std::memory_order_relaxed);
  return call.key(place.capturing, flags);
}

int64_t look_up(const autofa_key& key) {
  const int64_t known = table_get(key);
  if (__builtin_expect(known >= 0, 1)) return known;
  count(AUTOFA_COUNT_MISS);
  const autofa_miss_fn ask = miss_callback.load(std::memory_order_acquire);
  const int64_t answer = ask == nullptr ? -1 : ask(&key);
  if (answer < 0 || kernel_of(answer) == nullptr) return kSdpaId;
  return table_add(key, answer);
}

// An operator in Python, whose library may fail where its declaration says that it serves: that is
// said once there, and from then on torch.sdpa has the key.
Handle library_or_sdpa(Call& call, const Vendor& vendor, const autofa_key& key) {
  try {
    if (Handle out = run_vendor(vendor, call)) {
      count(AUTOFA_COUNT_VENDOR);
      return out;
    }
  } catch (const std::runtime_error&) {
    table_set(key, kSdpaId);
  }
  return fall_back(call);
}

}  // namespace

Handle forward(Call& call) {
  call.inspect();
  if (is_constant(call)) return constant(call);
  if (call.route == Route::kSdpa) return sdpa(call);
  const Place place = place_of(call);
  const autofa_key key = key_of(call, place);
  const int64_t id = look_up(key);
  if (id == kSdpaId) return sdpa(call);
  const Kernel& kernel = *kernel_of(id);
  if (kernel.vendor != nullptr) {
    if (kernel.vendor->refusal(call) != nullptr) return fall_back(call);
    if (kernel.vendor->op != nullptr) return library_or_sdpa(call, *kernel.vendor, key);
    count(AUTOFA_COUNT_VENDOR);
    return run_vendor(*kernel.vendor, call);
  }
  const char* why = nullptr;
  Handle out = launch(call, kernel, place, nullptr, why);
  return out ? std::move(out) : fall_back(call);
}

namespace {

const Kernel& forced(const Call& call, int64_t id) {
  const Kernel* kernel = kernel_of(id);
  require(kernel != nullptr, "kernel: got id ", id,
          "; supported: ids that autofa.runtime.kernels.load returned; load it first");
  require(id == kSdpaId || call.route != Route::kSdpa, kernel->slug, ": got ", call.sdpa_only,
          "; supported there: torch.sdpa alone; let autofa choose");
  return *kernel;
}

[[noreturn]] void refused(const Kernel& kernel, const char* why) {
  throw std::runtime_error(kernel.slug + " cannot serve this call: " + why);
}

Handle run_forced_vendor(Call& call, const Kernel& kernel, Handle* lse) {
  if (const char* why = kernel.vendor->refusal(call)) refused(kernel, why);
  Handle out = run_vendor(*kernel.vendor, call, lse);
  if (!out) {
    refused(kernel,
            "its library compiles for a shape at the first call, and not while a CUDA graph is "
            "captured: call it once before");
  }
  count(AUTOFA_COUNT_VENDOR);
  return out;
}

}  // namespace

Handle run(Call& call, int64_t id) {
  call.inspect();
  const Kernel& kernel = forced(call, id);
  if (is_constant(call)) return constant(call);
  if (kernel.vendor != nullptr) return run_forced_vendor(call, kernel, nullptr);
  const char* why = nullptr;
  Handle out = launch(call, kernel, place_of(call), nullptr, why);
  if (!out) refused(kernel, why);
  return out;
}

Handle run_with_lse(Call& call, int64_t id, Handle& lse) {
  call.inspect();
  const Kernel& kernel = forced(call, id);
  const char* why = "it does not return the log-sum-exp";
  if (kernel.vendor != nullptr && kernel.vendor->op == nullptr) refused(kernel, why);
  why = "there is nothing to compute";
  if (is_constant(call)) refused(kernel, why);
  if (kernel.vendor != nullptr) return run_forced_vendor(call, kernel, &lse);
  Handle out = launch(call, kernel, place_of(call), &lse, why);
  if (!out) refused(kernel, why);
  return out;
}

void set_miss(autofa_miss_fn fn) { miss_callback.store(fn, std::memory_order_release); }
void set_flags(int32_t flags) { process_flags.store(flags, std::memory_order_relaxed); }
int32_t get_flags() { return process_flags.load(std::memory_order_relaxed); }

int64_t counter(int32_t which) {
  return which >= 0 && which < AUTOFA_COUNTERS ? counters[which].load() : -1;
}

}  // namespace autofa::runtime
