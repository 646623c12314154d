// The C surface: no exception leaves it.
#include "api.h"

#include <cstdio>
#include <exception>

#include "face_memory.h"
#include "kernels.h"
#include "key.h"
#include "launch.h"
#include "python_face.h"
#include "table.h"

using namespace autofa::runtime;

extern "C" {

void autofa_set_miss(autofa_miss_fn fn) { set_miss(fn); }

int64_t autofa_add_library(const char* path, const char* slug, int32_t alignment, char* error,
                           int64_t error_bytes) {
  try {
    return add_library(path, slug, alignment);
  } catch (const std::exception& failure) {
    if (error != nullptr && error_bytes > 0) {
      std::snprintf(error, static_cast<size_t>(error_bytes), "%s", failure.what());
    }
    return -1;
  }
}

int64_t autofa_add_vendor(const char* slug) {
  try {
    return add_vendor(slug);
  } catch (const std::exception&) {
    return -1;
  }
}

void autofa_table_set(const autofa_key* key, int64_t id) {
  if (id < 0 || kernel_of(id) != nullptr) table_set(*key, id < 0 ? -1 : id);
}

int64_t autofa_table_get(const autofa_key* key) { return table_get(*key); }
void autofa_table_clear(void) { table_clear(); }
void autofa_set_flags(int32_t flags) { set_flags(flags); }
int32_t autofa_get_flags(void) { return get_flags(); }
int64_t autofa_counters(int32_t which) { return counter(which); }
int64_t autofa_bucket(int64_t n) { return nearest_power_of_two(n); }

int64_t autofa_sizeof(int32_t which) {
  constexpr int64_t sizes[] = {sizeof(autofa_params), sizeof(autofa_metadata), sizeof(autofa_key),
                               sizeof(autofa_executor)};
  return which >= 0 && which < 4 ? sizes[which] : -1;
}

const char* autofa_version(void) { return "1"; }

void* autofa_face_open(void* objects, int64_t payload) {
  return open_face(static_cast<python::Object*>(objects), payload);
}
void autofa_face_watch(void) { watch_face(); }
void autofa_face_forget(void) { forget_face(); }

void autofa_face_remember(void* query, void* key, void* value, int32_t causal, int32_t gqa,
                          int32_t trains, int32_t sdpa) {
  const auto object = [](void* pointer) { return static_cast<python::Object*>(pointer); };
  remember_in_face(object(query), object(key), object(value), causal != 0, gqa != 0, trains != 0,
                   sdpa != 0);
}

void autofa_face_remember_query(void* query) {
  remember_query_in_face(static_cast<python::Object*>(query));
}
}
