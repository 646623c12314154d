// The few functions of Python's stable ABI that python_face.cpp calls, looked up at run time: the
// library is built without Python's headers, links to no libpython, and serves every version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace autofa::runtime::python {

// What Python's ABI fixes of an object (builds with a global interpreter lock).
struct Object {
  intptr_t references;
  void* type;
};

using Call = Object* (*)(Object* self, Object* const* arguments, ptrdiff_t count);

struct Method {
  const char* name;
  Call call;
  int flags;
  const char* text;
};

constexpr int kFastCall = 0x0080;  // METH_FASTCALL

struct Functions {
  Object* (*call)(Object*, Object* const*, size_t, Object*);
  Object* (*attribute)(Object*, Object*);
  Object* (*function)(Method*, Object*, Object*);
  Object* (*item)(Object*, ptrdiff_t);
  double (*as_double)(Object*);
  long (*as_long)(Object*);
  void (*clear_error)();
  void (*retain)(Object*);
  void (*release)(Object*);
  Object* (*capsule)(void*, const char*, void (*)(Object*));
  void* (*unlock)();
  void (*lock)(void*);
  Object* none;
  Object* true_;
  Object* false_;
};

// Null where this process's Python lacks one of them.
const Functions* functions();

// A reference that is given back at the end of its scope.
class Reference {
 public:
  Reference(const Functions& python, Object* object) : python_(python), object_(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() {
    if (object_ != nullptr) python_.release(object_);
  }
  Object* get() const { return object_; }

 private:
  const Functions& python_;
  Object* object_;
};

// Gives the interpreter's lock to other threads until the end of its scope.
class Unlocked {
 public:
  explicit Unlocked(const Functions& python) : python_(python), thread_(python.unlock()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() { python_.lock(thread_); }

 private:
  const Functions& python_;
  void* thread_;
};

}  // namespace autofa::runtime::python
