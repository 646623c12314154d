// Makes a call's device the current one.
#pragma once

#include "call.h"

namespace autofa::runtime {

// While it lives; free where it already is, and on CPU.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Call& call) {
    if (!call.on_cuda()) return;
    int32_t current = -1;
    check(aoti_torch_get_current_device_index(&current), "reading the current device");
    if (current == call.q.device_index) return;
    check(aoti_torch_create_device_guard(call.q.device_index, &guard_), "switching the device");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  }

 private:
  DeviceGuardHandle guard_ = nullptr;
};

}  // namespace autofa::runtime
