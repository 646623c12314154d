// Functions of libraries that torch has loaded, looked up at run time: nothing here links to CUDA.
#pragma once

#include <dlfcn.h>

namespace autofa::runtime {

// Null where that library is not loaded or lacks the symbol. RTLD_NOLOAD, because torch loads its
// libraries locally: RTLD_DEFAULT finds none of them, and a plain dlopen could bring a second copy.
inline void* symbol_of(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : dlsym(handle, name);
}

}  // namespace autofa::runtime
