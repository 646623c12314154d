#include "python_face.h"

#include <dlfcn.h>

#include <cstring>
#include <limits>

#include "call.h"
#include "face_memory.h"
#include "launch.h"

namespace autofa::runtime {

namespace python {

const Functions* functions() {
  static Functions found;
  static const bool complete = [] {
    const auto find = [](auto& place, const char* name) {
      void* symbol = dlsym(RTLD_DEFAULT, name);
      std::memcpy(&place, &symbol, sizeof(symbol));
      return symbol != nullptr;
    };
    return find(found.call, "PyObject_Vectorcall") && find(found.attribute, "PyObject_GetAttr") &&
           find(found.function, "PyCFunction_NewEx") && find(found.item, "PyTuple_GetItem") &&
           find(found.as_double, "PyFloat_AsDouble") && find(found.as_long, "PyLong_AsLong") &&
           find(found.clear_error, "PyErr_Clear") && find(found.retain, "Py_IncRef") &&
           find(found.release, "Py_DecRef") && find(found.capsule, "PyCapsule_New") &&
           find(found.unlock, "PyEval_SaveThread") && find(found.lock, "PyEval_RestoreThread") &&
           find(found.none, "_Py_NoneStruct") && find(found.true_, "_Py_TrueStruct") &&
           find(found.false_, "_Py_FalseStruct");
  }();
  return complete ? &found : nullptr;
}

}  // namespace python

namespace {

using python::Object;

FaceObjects objects;
int64_t payload_at = 0;
bool watching = false;

AtenTensorHandle handle_of(Object* tensor) {
  return reinterpret_cast<AtenTensorHandle>(reinterpret_cast<char*>(tensor) + payload_at);
}

// What is read of a tensor; sizes and strides are torch's own, for as long as the tensor lives.
struct View {
  int64_t *sizes, *strides;
  int64_t rank;
  int32_t dtype, device_type;
};

bool read_sizes(AtenTensorHandle tensor, View& view) {
  return aoti_torch_get_dim(tensor, &view.rank) == 0 && view.rank >= 2 && view.rank <= 4 &&
         aoti_torch_get_sizes(tensor, &view.sizes) == 0 &&
         aoti_torch_get_strides(tensor, &view.strides) == 0;
}

bool read(Object* object, View& view) {
  const AtenTensorHandle tensor = handle_of(object);
  return aoti_torch_get_dtype(tensor, &view.dtype) == 0 &&
         aoti_torch_get_device_type(tensor, &view.device_type) == 0 && read_sizes(tensor, view);
}

// Whether torch tells the sizes of such a tensor; where it does not, it writes to stderr.
bool tells_sizes(const python::Functions& python, Object* tensor) {
  int32_t layout;
  if (aoti_torch_get_layout(handle_of(tensor), &layout) != 0 ||
      layout != aoti_torch_layout_strided()) {
    return false;
  }
  const python::Reference nested(python, python.attribute(tensor, objects.is_nested));
  if (nested.get() == nullptr) python.clear_error();
  return nested.get() == python.false_;
}

bool same_device(Object* a, Object* b) {
  int32_t first, second;
  return aoti_torch_get_device_index(handle_of(a), &first) == 0 &&
         aoti_torch_get_device_index(handle_of(b), &second) == 0 && first == second;
}

// The query, key and value of a call; false where they are not alike or not for this cache.
bool read_all(const python::Functions& python, Object* const* call, View* views) {
  if (!tells_sizes(python, call[0])) return false;
  for (int i = 0; i < 3; ++i) {
    if (!read(call[i], views[i]) || views[i].dtype != views[0].dtype ||
        views[i].device_type != views[0].device_type) {
      return false;
    }
  }
  return views[0].device_type == codes.cpu ||
         (same_device(call[0], call[1]) && same_device(call[0], call[2]));
}

Shape shape_of(Object* query, const View* views, int count, int32_t options) {
  Shape shape;
  std::memset(&shape, 0, sizeof(shape));
  for (int i = 0; i < count; ++i) {
    shape.ranks[i] = static_cast<int32_t>(views[i].rank);
    for (int64_t dim = 0; dim < views[i].rank; ++dim) shape.sizes[i][dim] = views[i].sizes[dim];
  }
  shape.dtype = views[0].dtype;
  shape.device_type = views[0].device_type;
  check(aoti_torch_get_device_index(handle_of(query), &shape.device_index), "reading a device");
  uint32_t threads = 0;
  check(torch_get_num_threads(&threads), "reading the number of threads");
  shape.threads = static_cast<int32_t>(threads);
  shape.options = options;
  return shape;
}

// Whether autofa/dispatch/mending.py has nothing to do with this tensor.
bool ordinary(Object* object, const View& tensor) {
  const int64_t width = tensor.sizes[tensor.rank - 1];
  int64_t dense = 1, bits = 0;
  bool contiguous = true, apart = tensor.rank == 4;
  for (int64_t i = tensor.rank; i-- > 0;) {
    const int64_t stride = tensor.strides[i];
    contiguous &= tensor.sizes[i] == 1 || stride == dense;
    dense *= tensor.sizes[i];
    if (i + 1 == tensor.rank) {
      apart &= stride == 1;
    } else {
      apart &= stride >= width;
      bits |= stride;
    }
  }
  if (!contiguous && !apart) return false;
  if (tensor.device_type != codes.cuda) return true;
  const int64_t bytes = tensor.dtype == codes.f64 ? 8 : tensor.dtype == codes.f32 ? 4 : 2;
  void* data;
  if (aoti_torch_get_data_ptr(handle_of(object), &data) != 0) return false;
  const auto address = reinterpret_cast<uintptr_t>(data);
  // As `off_grid`: sizes of 1 have any stride, and count.
  const bool rows_fit = width * bytes % 16 == 0;
  return address % 16 == 0 && (bits * bytes % 16 == 0 || (contiguous && !rows_fit));
}

// Whether a question that takes no arguments is answered by `expected`.
bool answers(const python::Functions& python, Object* question, Object* expected) {
  const python::Reference answer(python, python.call(question, nullptr, 0, nullptr));
  if (answer.get() == nullptr) python.clear_error();
  return answer.get() == expected;
}

bool forward_mode(const python::Functions& python) {
  const python::Reference level(python,
                                python.attribute(objects.forward_ad, objects.current_level));
  if (level.get() == nullptr) {
    python.clear_error();
    return true;
  }
  return python.as_long(level.get()) >= 0;
}

// `out`, a new reference, in the strides that every kernel gives.
Object* with_strides(const python::Functions& python, Object* out, Object* const* call,
                     const View& query, Object* gqa) {
  if (out->type != objects.tensor_type) return out;
  View found;
  bool right = read_sizes(handle_of(out), found) && found.rank == query.rank;
  if (right) {
    int64_t strides[4];
    output_strides(query.sizes, query.strides, query.rank, found.sizes, found.rank, strides);
    for (int64_t i = 0; i < found.rank; ++i) {
      right &= found.sizes[i] == 1 || found.strides[i] == strides[i];
    }
  }
  if (right) return out;
  Object* const arguments[] = {out, call[0], call[1], call[2], gqa};
  Object* changed = python.call(objects.restride, arguments, 5, nullptr);
  python.release(out);
  return changed;
}

Object* by_sdpa(const python::Functions& python, Object* const* call, const View& query,
                Object* causal, Object* scale, Object* gqa) {
  Object* arguments[8] = {call[0], call[1], call[2]};
  size_t count = 3;
  if (causal == python.true_) {  // what is not needed costs torch's parser time
    arguments[3] = python.none;
    arguments[4] = call[3];
    arguments[5] = causal;
    count = 6;
  }
  Object* keywords = nullptr;
  size_t place = count;
  if (scale != python.none) {
    arguments[place++] = scale;
    keywords = objects.with_scale;
  }
  if (gqa == python.true_) {
    arguments[place++] = gqa;
    keywords = scale == python.none ? objects.with_gqa : objects.with_both;
  }
  Object* out = python.call(objects.sdpa, arguments, count, keywords);
  return out == nullptr ? nullptr : with_strides(python, out, call, query, gqa);
}

bool needs_gradients(const python::Functions& python, Object* const* call) {
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  for (int i = 0; i < 3; ++i) {
    const python::Reference needs(python, python.attribute(call[i], objects.requires_grad));
    if (needs.get() == nullptr) python.clear_error();
    if (needs.get() != python.false_) return true;
  }
  return false;
}

// Query, key and value, not owned.
struct Inputs {
  AtenTensorHandle query, key, value;
};

// Whether their values lie in memory of a device of ours: neither sparse, nor empty, nor of torch's
// symbolic kinds.
bool in_memory(const Inputs& inputs) {
  for (const AtenTensorHandle tensor : {inputs.query, inputs.key, inputs.value}) {
    int32_t layout, device;
    const void* data;
    if (aoti_torch_get_layout(tensor, &layout) != 0 || layout != aoti_torch_layout_strided() ||
        aoti_torch_get_device_type(tensor, &device) != 0 ||
        (device != codes.cpu && device != codes.cuda) ||
        torch_get_const_data_ptr(tensor, &data) != 0 || data == nullptr) {
      return false;
    }
  }
  return true;
}

// Whether nothing stands between a call and its kernel but the dispatcher.
bool undisturbed(const python::Functions& python) {
  return answers(python, objects.any_autocast, python.false_) &&
         answers(python, objects.function_mode, python.false_) && !forward_mode(python);
}

// Whether the dispatcher would do nothing but find the kernel, in an undisturbed call.
bool may_skip_dispatcher(const python::Functions& python, Object* const* call,
                         const Inputs& inputs) {
  if (objects.adopt == python.none || !answers(python, objects.profiling, python.false_)) {
    return false;
  }
  const python::Reference modes(python, python.call(objects.dispatch_modes, nullptr, 0, nullptr));
  if (modes.get() == nullptr || python.as_long(modes.get()) != 0) return false;
  for (int i = 0; i < 3; ++i) {
    const python::Reference negative(python, python.call(objects.is_neg, call + i, 1, nullptr));
    if (negative.get() != python.false_) return false;
  }
  return in_memory(inputs);
}

// Python's object of a tensor; a new reference.
Object* adopted(const python::Functions& python, const Handle& tensor) {
  const python::Reference capsule(python, python.capsule(tensor.get(), nullptr, nullptr));
  Object* const argument = capsule.get();
  return argument == nullptr ? nullptr : python.call(objects.adopt, &argument, 1, nullptr);
}

Handle again(AtenTensorHandle tensor) {
  Handle other;
  check(aoti_torch_new_tensor_handle(tensor, other.receive()), "holding a tensor");
  return other;
}

Object* by_kernel(const python::Functions& python, const Inputs& inputs, bool causal,
                  const double* scale, bool gqa) {
  Handle out;
  Call call(again(inputs.query), again(inputs.key), again(inputs.value), causal, scale, gqa);
  {
    const python::Unlocked unlocked(python);
    out = forward(call);
  }
  return adopted(python, out);
}

// A new reference; null where Python has to look closer, with or without an error set.
Object* attend(const python::Functions& python, Object* const* call) {
  Object *dropout = call[3], *causal = call[4], *scale = call[5], *gqa = call[6];
  for (int i = 0; i < 3; ++i) {
    if (call[i]->type != objects.tensor_type) return nullptr;
  }
  const auto is_bool = [&](Object* value) {
    return value == python.true_ || value == python.false_;
  };
  if (dropout->type != objects.float_type || python.as_double(dropout) != 0.0 || !is_bool(causal) ||
      !is_bool(gqa) || (scale != python.none && scale->type != objects.float_type)) {
    return nullptr;
  }
  const bool trains = needs_gradients(python, call);
  if (!answers(python, objects.functorch, python.none) ||
      !answers(python, objects.tracing, python.none)) {
    return nullptr;
  }
  const Inputs inputs{handle_of(call[0]), handle_of(call[1]), handle_of(call[2])};
  const double number = scale == python.none ? 0 : python.as_double(scale);
  const double* const given = scale == python.none ? nullptr : &number;
  if (watching || trains) {
    View views[3];
    if (!read_all(python, call, views)) return nullptr;
    const int32_t options = (causal == python.true_) | (gqa == python.true_) << 1 | trains << 2;
    Answer answer = known(shape_of(call[0], views, 3, options));
    if (answer == Answer::kUnknown && !trains) answer = known(shape_of(call[0], views, 1, 8));
    if (answer == Answer::kSdpa) {
      // Torch's own function needs none of the questions below. Scales of 0 or less, NaN, and those
      // that f32 does not hold in full it gets wrong.
      const bool right = (given == nullptr || number >= std::numeric_limits<float>::min()) &&
                         ordinary(call[0], views[0]) && ordinary(call[1], views[1]) &&
                         ordinary(call[2], views[2]);
      return right ? by_sdpa(python, call, views[0], causal, scale, gqa) : nullptr;
    }
    if (answer == Answer::kUnknown) return nullptr;
  }
  const bool deterministic = (get_flags() & 1) != 0;
  if (trains || !undisturbed(python) ||
      !answers(python, objects.deterministic, deterministic ? python.true_ : python.false_)) {
    return nullptr;
  }
  if (may_skip_dispatcher(python, call, inputs)) {
    return by_kernel(python, inputs, causal == python.true_, given, gqa == python.true_);
  }
  Object* const arguments[] = {call[0], call[1], call[2], python.none, causal, scale, gqa};
  return python.call(objects.fwd, arguments, 7, nullptr);
}

Object* face(Object*, Object* const* arguments, ptrdiff_t count) {
  const python::Functions& python = *python::functions();
  Object* out = nullptr;
  if (count == 7) {
    try {
      out = attend(python, arguments);
    } catch (const std::exception&) {  // a tensor that torch's C shim cannot read
      out = nullptr;
    }
  }
  if (out == nullptr) {
    python.clear_error();  // Python's own way meets it again, and says what is wrong
    python.retain(python.none);
    out = python.none;
  }
  return out;
}

void remember(Object* const* call, int count, int32_t options, Answer answer) {
  const python::Functions& python = *python::functions();
  View views[3];
  try {
    for (int i = 0; i < 3; ++i) {
      if (call[i]->type != objects.tensor_type || !tells_sizes(python, call[i])) return;
    }
    if (read_all(python, call, views)) enter(shape_of(call[0], views, count, options), answer);
  } catch (const std::exception&) {  // such a tensor is Python's
  }
}

}  // namespace

Object* open_face(Object* given, int64_t payload) {
  const python::Functions* python = python::functions();
  if (python == nullptr) return nullptr;
  constexpr size_t kObjects = sizeof(FaceObjects) / sizeof(Object*);
  Object* items[kObjects];
  for (size_t i = 0; i < kObjects; ++i) {
    items[i] = python->item(given, static_cast<ptrdiff_t>(i));
    if (items[i] == nullptr) {
      python->clear_error();
      return nullptr;
    }
  }
  for (Object* item : items) python->retain(item);  // for as long as the process lives
  std::memcpy(&objects, items, sizeof(items));
  payload_at = payload;
  static python::Method method{"attention", face, python::kFastCall, nullptr};
  return python->function(&method, nullptr, nullptr);
}

void watch_face() { watching = true; }

void remember_in_face(Object* query, Object* key, Object* value, bool causal, bool gqa, bool trains,
                      bool sdpa) {
  Object* const call[] = {query, key, value};
  remember(call, 3, causal | gqa << 1 | trains << 2, sdpa ? Answer::kSdpa : Answer::kOperator);
}

void remember_query_in_face(Object* query) {
  Object* const call[] = {query, query, query};
  remember(call, 1, 8, Answer::kOperator);
}

}  // namespace autofa::runtime
