// The usual calls of `attention` from Python, without Python's own time.
//
// What autofa/dispatch/face.py asks of a call costs Python 1.3 us, and 3 where plain SDPA wins;
// here 0.3. The function made here takes (query, key, value, dropout_p, is_causal, scale,
// enable_gqa) and returns the output, or None where face.py has to look closer: it decides nothing
// by itself but what autofa/dispatch/shortcut.py has told it.
#pragma once

#include "python.h"

namespace autofa::runtime {

// The objects of Python that a call needs, in the order of the tuple of
// autofa/runtime/python_face.py.
struct FaceObjects {
  python::Object *tensor_type, *float_type;
  python::Object *sdpa, *fwd, *restride;
  python::Object *any_autocast, *function_mode, *functorch, *tracing, *deterministic;
  python::Object *forward_ad, *current_level, *requires_grad, *is_nested;
  // For calls without the dispatcher; `adopt` is None where this torch has no such function.
  python::Object *adopt, *is_neg, *dispatch_modes, *profiling;
  python::Object *with_gqa, *with_scale, *with_both;  // tuples of keywords
};

// The function, null where this Python does not serve. `payload`: at which byte of a tensor object
// torch's own tensor is. Everything here needs the interpreter's lock, and nothing else.
python::Object* open_face(python::Object* objects, int64_t payload);

void watch_face();  // plain SDPA has won something: only calls that are known are served
// Who serves such calls without a mask, of grad mode too: plain SDPA, or the operator.
void remember_in_face(python::Object* query, python::Object* key, python::Object* value,
                      bool causal, bool gqa, bool trains, bool sdpa);
// That the operator serves every call with such a query.
void remember_query_in_face(python::Object* query);

}  // namespace autofa::runtime
