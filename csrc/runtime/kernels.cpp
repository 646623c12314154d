// Loading and registering kernels.
#include "kernels.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace autofa::runtime {
namespace {

constexpr int64_t kMaxKernels = 1 << 16;

std::atomic<const Kernel*> kernels[kMaxKernels];
std::atomic<int64_t> count{0};
std::mutex writing;

int64_t add(const Kernel* kernel) {
  const int64_t id = count.load(std::memory_order_relaxed);
  if (id == kMaxKernels) throw std::runtime_error("kernels: got more than 65536 in one process");
  kernels[id].store(kernel, std::memory_order_release);
  count.store(id + 1, std::memory_order_release);
  return id;
}

// torch.sdpa is id 0 from the start.
const int64_t sdpa_id = add(new Kernel{"torch.sdpa", "", find_vendor("torch.sdpa")});

template <class Function>
Function* symbol(void* library, const char* name, const std::string& path) {
  auto* found = reinterpret_cast<Function*>(dlsym(library, name));
  if (found == nullptr) {
    throw std::runtime_error(path + ": got no symbol " + name +
                             "; supported: libraries built from csrc/kernels; rebuild it");
  }
  return found;
}

const Kernel* load(const std::string& path, const std::string& slug, int32_t alignment) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  try {
    auto* describe = symbol<decltype(autofa_describe)>(library, "autofa_describe", path);
    const autofa_metadata* metadata = describe();
    if (metadata->abi_version != AUTOFA_ABI_VERSION ||
        metadata->params_bytes != sizeof(autofa_params)) {
      throw std::runtime_error(
          path + ": got ABI " + std::to_string(metadata->abi_version) + " with " +
          std::to_string(metadata->params_bytes) +
          " parameter bytes; supported: " + std::to_string(AUTOFA_ABI_VERSION) + " with " +
          std::to_string(sizeof(autofa_params)) + "; rebuild it");
    }
    if (slug != metadata->slug) {
      throw std::runtime_error(path + ": got " + metadata->slug + "; supported: " + slug +
                               "; rebuild it");
    }
    auto* kernel = new Kernel{slug, path};
    kernel->launch = symbol<decltype(autofa_launch)>(library, "autofa_launch", path);
    kernel->workspace_bytes =
        symbol<decltype(autofa_workspace_bytes)>(library, "autofa_workspace_bytes", path);
    kernel->metadata = metadata;
    kernel->alignment_mask = alignment > 1 ? static_cast<uint64_t>(alignment) - 1 : 0;
    return kernel;
  } catch (...) {
    dlclose(library);
    throw;
  }
}

}  // namespace

const Kernel* kernel_of(int64_t id) {
  if (id < 0 || id >= kMaxKernels) return nullptr;
  return kernels[id].load(std::memory_order_acquire);
}

int64_t add_library(const std::string& path, const std::string& slug, int32_t alignment) {
  const std::lock_guard<std::mutex> lock(writing);
  for (int64_t id = 0; id < count.load(std::memory_order_relaxed); ++id) {
    if (kernels[id].load()->path == path && kernels[id].load()->slug == slug) return id;
  }
  return add(load(path, slug, alignment));
}

int64_t add_vendor(const std::string& slug) {
  const std::lock_guard<std::mutex> lock(writing);
  for (int64_t id = 0; id < count.load(std::memory_order_relaxed); ++id) {
    if (kernels[id].load()->vendor != nullptr && kernels[id].load()->slug == slug) return id;
  }
  const Vendor* vendor = find_vendor(slug);
  return vendor == nullptr ? -1 : add(new Kernel{slug, "", vendor});
}

}  // namespace autofa::runtime
