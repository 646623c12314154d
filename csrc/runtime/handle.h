// An owned tensor handle of libtorch's stable ABI, and the check of its error codes.
//
// torch::stable::Tensor does the same with a shared_ptr, whose control block is an allocation per
// tensor; calls here are counted in nanoseconds.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <sstream>
#include <stdexcept>
#include <utility>

namespace autofa::runtime {

// Throws std::runtime_error with the parts as its text, unless `ok`.
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (__builtin_expect(ok, 1)) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// Throws std::runtime_error: `what` failed, with torch's own message where this torch tells it.
[[noreturn]] void throw_torch_failure(const char* what);

inline void check(AOTITorchError code, const char* what) {
  if (__builtin_expect(code != 0, 0)) throw_torch_failure(what);
}

class Handle {
 public:
  Handle() = default;
  explicit Handle(AtenTensorHandle handle) : handle_(handle) {}
  Handle(Handle&& other) noexcept : handle_(other.release()) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = other.release();
    }
    return *this;
  }
  ~Handle() { reset(); }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  explicit operator bool() const { return handle_ != nullptr; }
  // Where a function of the C ABI writes a new reference.
  AtenTensorHandle* receive() {
    reset();
    return &handle_;
  }

 private:
  void reset() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(std::exchange(handle_, nullptr));
  }
  AtenTensorHandle handle_ = nullptr;
};

}  // namespace autofa::runtime
