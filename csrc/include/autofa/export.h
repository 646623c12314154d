// Turns a family's Kernel<Params> into the library described by abi.h. Only for generated stubs.
//
// `Params` is a struct of named constants (`static constexpr int block_m = 64; ...`): no template
// argument is ever passed by position. A family provides, in namespace autofa::<folder>,
//   template <class Params> struct Kernel {
//     static constexpr int threads, smem_bytes;   // 0 on CPU
//     static int32_t launch(const autofa_params&, const autofa_executor&, void* stream);
//     static int64_t workspace_bytes(const autofa_params&);
//   };
// The build defines AUTOFA_SLUG, AUTOFA_FINGERPRINT, AUTOFA_TARGET and AUTOFA_COMPILER.
#pragma once

#include "autofa/abi.h"

#define AUTOFA_EXPORT_VARIANT(KernelType)                                                        \
  extern "C" int32_t autofa_launch(const autofa_params* params, const autofa_executor* executor, \
                                   void* stream) {                                               \
    if (params->struct_bytes != sizeof(autofa_params)) return AUTOFA_REFUSED;                    \
    return KernelType::launch(*params, *executor, stream);                                       \
  }                                                                                              \
  extern "C" int64_t autofa_workspace_bytes(const autofa_params* params) {                       \
    return KernelType::workspace_bytes(*params);                                                 \
  }                                                                                              \
  extern "C" const autofa_metadata* autofa_describe(void) {                                      \
    static const autofa_metadata record = {                                                      \
        AUTOFA_ABI_VERSION, sizeof(autofa_params), AUTOFA_SLUG,         AUTOFA_FINGERPRINT,      \
        AUTOFA_TARGET,      AUTOFA_COMPILER,       KernelType::threads, KernelType::smem_bytes}; \
    return &record;                                                                              \
  }
