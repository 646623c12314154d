// Reading, checking and classifying the arguments of a call.
#include "call.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "key.h"

namespace autofa::runtime {

const Codes codes{aoti_torch_dtype_float32(),   aoti_torch_dtype_float16(),
                  aoti_torch_dtype_bfloat16(),  aoti_torch_dtype_float64(),
                  aoti_torch_dtype_bool(),      aoti_torch_device_type_cpu(),
                  aoti_torch_device_type_cuda()};

namespace {

// 2 bytes for everything but f32: only own dtypes come here.
int64_t element_bytes(int32_t dtype) { return dtype == AUTOFA_F32 ? 4 : 2; }

int32_t own_dtype(int32_t code) {
  if (code == codes.f32) return AUTOFA_F32;
  if (code == codes.f16) return AUTOFA_F16;
  if (code == codes.bf16) return AUTOFA_BF16;
  return -1;
}

bool broadcasts(int64_t a, int64_t b) { return a == b || a == 1 || b == 1; }

// Strides of the batch, head and row dims; 0 for a dim that a 3-D tensor has not.
void copy_strides(const Tensor& tensor, int64_t* out) {
  out[0] = tensor.rank == 4 ? tensor.strides[0] : 0;
  out[1] = tensor.strides[tensor.rank - 3];
  out[2] = tensor.strides[tensor.rank - 2];
}

// Collects the low address bits and the largest offset of a tensor.
void measure(const Tensor& tensor, int64_t bytes, uint64_t& bits, bool& wide) {
  int64_t last = 0;
  bits |= reinterpret_cast<uintptr_t>(tensor.data);
  for (int64_t i = 0; i + 1 < tensor.rank; ++i) {
    if (tensor.sizes[i] <= 1) continue;
    bits |= static_cast<uint64_t>(tensor.strides[i] * bytes);
    last += (tensor.sizes[i] - 1) * tensor.strides[i];
  }
  wide |= last + tensor.sizes[tensor.rank - 1] > INT32_MAX;
}

bool dense_rows(const Tensor& tensor) {
  return tensor.strides[tensor.rank - 1] == 1 || tensor.sizes[tensor.rank - 1] == 1;
}

}  // namespace

void Tensor::read() {
  const AtenTensorHandle tensor = handle.get();
  int64_t* size;
  int64_t* stride;
  check(aoti_torch_get_dim(tensor, &rank), "reading a rank");
  check(aoti_torch_get_sizes(tensor, &size), "reading sizes");
  check(aoti_torch_get_strides(tensor, &stride), "reading strides");
  check(torch_get_const_data_ptr(tensor, &data), "reading an address");
  check(aoti_torch_get_dtype(tensor, &dtype), "reading a dtype");
  check(aoti_torch_get_device_type(tensor, &device_type), "reading a device");
  check(aoti_torch_get_device_index(tensor, &device_index), "reading a device");
  require(rank <= kMaxRank, "rank: got ", rank, "; supported: 2 ... ", kMaxRank,
          "; flatten leading dims");
  for (int64_t i = 0; i < rank; ++i) {
    sizes[i] = size[i];
    strides[i] = stride[i];
  }
}

std::ostream& operator<<(std::ostream& text, const Tensor& tensor) {
  text << '(';
  for (int64_t i = 0; i < tensor.rank; ++i) text << (i ? ", " : "") << tensor.sizes[i];
  return text << ')';
}

std::ostream& operator<<(std::ostream& text, const Call& call) {
  return text << "query " << call.q << ", key " << call.k << ", value " << call.v;
}

namespace {
Handle tensor(uint64_t word) { return Handle(reinterpret_cast<AtenTensorHandle>(word)); }
}  // namespace

Call::Call(uint64_t* stack) {
  q.handle = tensor(stack[0]);
  k.handle = tensor(stack[1]);
  v.handle = tensor(stack[2]);
  // An optional arrives as null, or as a pointer to a value that the receiver frees.
  if (auto* boxed = reinterpret_cast<uint64_t*>(stack[3])) {
    mask.handle = tensor(*boxed);
    has_mask = true;
    delete boxed;
  }
  causal = static_cast<bool>(stack[4] & 0xff);
  if (auto* boxed = reinterpret_cast<uint64_t*>(stack[5])) {
    std::memcpy(&scale, boxed, sizeof(scale));
    has_scale = true;
    delete boxed;
  }
  gqa = static_cast<bool>(stack[6] & 0xff);
  lower_right = static_cast<bool>(stack[7] & 0xff);
}

Call::Call(Handle query, Handle key, Handle value, bool is_causal, const double* given_scale,
           bool enable_gqa)
    : causal(is_causal), gqa(enable_gqa), has_scale(given_scale != nullptr) {
  q.handle = std::move(query);
  k.handle = std::move(key);
  v.handle = std::move(value);
  if (has_scale) scale = *given_scale;
}

void Call::inspect() {
  q.read();
  k.read();
  v.read();
  if (has_mask) mask.read();
  require(q.dtype == k.dtype && q.dtype == v.dtype,
          "dtype: got query, key and value of different dtypes; supported: one dtype for "
          "all three; cast them to one");
  require(
      q.device_type == k.device_type && q.device_type == v.device_type &&
          q.device_index == k.device_index && q.device_index == v.device_index &&
          (!has_mask || (mask.device_type == q.device_type && mask.device_index == q.device_index)),
      "device: got tensors on different devices; supported: one device for all; move "
      "them to one");
  const int32_t dtype = own_dtype(q.dtype);
  require(dtype >= 0 || q.dtype == codes.f64,
          "dtype: got one that attention is not defined for; supported: f32, f16, bf16, "
          "f64; cast query, key and value");
  require(q.rank >= 2 && k.rank >= 2 && v.rank >= 2, "rank: got ", *this,
          "; supported: (..., N, D); add the missing dims");
  require(q.size(1) == k.size(1), "head dim: got ", *this,
          "; supported: one head dim for query and key; slice or pad one of them");
  require(k.size(2) == v.size(2), "length: got ", *this,
          "; supported: one length for key and value; slice one of them");
  if (has_mask) {
    require(mask.dtype == codes.boolean || mask.dtype == q.dtype || mask.dtype == codes.f32,
            "attn_mask dtype: got another one than supported: bool, f32 or the query's; "
            "cast it");
    require(mask.rank >= 2 && broadcasts(mask.size(1), k.size(2)) &&
                broadcasts(mask.size(2), q.size(2)) && mask.size(1) <= k.size(2) &&
                mask.size(2) <= q.size(2),
            "attn_mask: got shape ", mask, " for ", *this,
            "; supported: what broadcasts to (..., Nq, Nk); reshape it");
  }
  // On a square the two corners meet, and the kernels of the upper-left one serve.
  lower_right &= causal && q.size(2) != k.size(2);
  if (!has_scale) scale = 1.0 / std::sqrt(static_cast<double>(q.size(1)));

  inspect_any();
  if (std::isnan(scale)) {
    route = Route::kNan;
  } else if (is_empty()) {
    route = Route::kEmpty;
  }
  if (route != Route::kKernels) return;
  if (dtype < 0) {
    sdpa_only = "dtype f64";
    route = Route::kSdpa;
  } else if (has_mask && causal) {
    sdpa_only = "attn_mask together with is_causal";
    route = Route::kSdpa;
  } else if (q.size(1) == 0 || !dense_rows(q) || !dense_rows(k) || !dense_rows(v)) {
    sdpa_only = "a head dim of size 0 or of a stride other than 1";
    route = Route::kSdpa;
  } else {
    params.dtype = dtype;
    fill_params();
  }
}

// Whether nothing is to be computed. torch.sdpa would then give the query's leading dims, not the
// broadcast ones.
bool Call::is_empty() const {
  const int64_t rank = std::max(q.rank, std::max(k.rank, v.rank));
  return k.size(2) == 0 || std::count(out_sizes, out_sizes + rank, 0) > 0;
}

// Leading dims: equal ones are for every kernel, those that only broadcast are for torch.sdpa.
void Call::inspect_any() {
  const int64_t rank = std::max(q.rank, std::max(k.rank, v.rank));
  bool plain = q.rank == k.rank && q.rank == v.rank && (rank == 3 || rank == 4);
  int64_t sizes[kMaxRank];
  const auto dim = [rank](const Tensor& t, int64_t i) {
    return i < rank - t.rank ? 1 : t.sizes[i - (rank - t.rank)];
  };
  for (int64_t i = 0; i < rank - 2; ++i) {
    const int64_t a = dim(q, i), b = dim(k, i), c = dim(v, i);
    const bool grouped = gqa && i == rank - 3;
    const bool divides = b > 0 && c > 0 && a % b == 0 && a % c == 0;
    require((a == b && a == c) || (grouped && divides) ||
                (!grouped && broadcasts(a, b) && broadcasts(a, c) && broadcasts(b, c)),
            grouped ? "heads: got " : "leading dims: got ", *this,
            grouped ? "; supported with enable_gqa: query heads that are a multiple of the "
                      "key and value heads; change one of them"
                    : "; supported: equal sizes, sizes of 1, or more query heads with "
                      "enable_gqa=True; change one of them");
    sizes[i] = grouped ? a : a != 1 ? a : b != 1 ? b : c;
    plain &= b == c && (a == b || grouped);
  }
  sizes[rank - 2] = q.size(2);
  sizes[rank - 1] = v.size(1);
  if (has_mask) {
    plain &= mask.rank <= rank;
    for (int64_t i = 0; plain && i < mask.rank - 2; ++i) {
      const int64_t size = mask.sizes[i];
      require(size == 1 || size == sizes[rank - mask.rank + i], "attn_mask: got shape ", mask,
              " for ", *this, "; supported: what broadcasts to (..., Nq, Nk); reshape it");
    }
  }
  fill_output(sizes, rank);
  route = plain ? Route::kKernels : Route::kSdpa;
  if (!plain) sdpa_only = "leading dims that broadcast, or a rank other than 3 and 4";
}

// Dense strides in the order of the query's: what torch.empty_like gives, with the head dim always
// innermost. Dims of equal stride and those of stride 0 keep their order, as there.
void output_strides(const int64_t* query_sizes, const int64_t* query_strides, int64_t query_rank,
                    const int64_t* sizes, int64_t rank, int64_t* strides) {
  int64_t order[kMaxRank];  // leading dims, innermost first
  const int64_t leading = rank - 1;
  for (int64_t i = 0; i < leading; ++i) order[i] = leading - 1 - i;
  if (query_rank == rank) {
    for (int64_t i = 1; i < leading; ++i) {
      int64_t place = i;
      for (int64_t j = i; j-- > 0;) {
        const int64_t inner = order[j], outer = order[place];
        const int64_t a = query_strides[inner], b = query_strides[outer];
        if (a == 0 || b == 0) continue;
        if (a < b) break;
        if (a > b || query_sizes[inner] > query_sizes[outer]) {
          std::swap(order[j], order[place]);
          place = j;
        }
      }
    }
  }
  int64_t stride = sizes[rank - 1] > 0 ? sizes[rank - 1] : 1;
  for (int64_t i = 0; i < leading; ++i) {
    strides[order[i]] = stride;
    stride *= sizes[order[i]] > 0 ? sizes[order[i]] : 1;
  }
  strides[rank - 1] = 1;
}

void Call::fill_output(const int64_t* sizes, int64_t rank) {
  output_strides(q.sizes, q.strides, q.rank, sizes, rank, out_strides);
  std::memcpy(out_sizes, sizes, rank * sizeof(int64_t));
}

void Call::fill_params() {
  params.struct_bytes = sizeof(autofa_params);
  params.causal = !causal       ? AUTOFA_CAUSAL_NONE
                  : lower_right ? AUTOFA_CAUSAL_LOWER_RIGHT
                                : AUTOFA_CAUSAL_UPPER_LEFT;
  params.mask = !has_mask                     ? AUTOFA_MASK_NONE
                : mask.dtype == codes.boolean ? AUTOFA_MASK_BOOL
                                              : AUTOFA_MASK_ADDITIVE;
  params.mask_dtype = params.mask == AUTOFA_MASK_ADDITIVE ? own_dtype(mask.dtype) : 0;
  params.device_index = on_cuda() ? q.device_index : -1;
  params.q = q.data;
  params.k = k.data;
  params.v = v.data;
  params.attn_mask = mask.data;
  params.out = nullptr;
  params.lse = nullptr;
  params.workspace = nullptr;
  params.batch = q.rank == 4 ? q.sizes[0] : 1;
  params.heads_q = q.size(3);
  params.heads_kv = k.size(3);
  params.seqlen_q = q.size(2);
  params.seqlen_k = k.size(2);
  params.head_dim = q.size(1);
  params.head_dim_v = v.size(1);
  copy_strides(q, params.q_strides);
  copy_strides(k, params.k_strides);
  copy_strides(v, params.v_strides);
  params.out_strides[0] = q.rank == 4 ? out_strides[0] : 0;
  params.out_strides[1] = out_strides[q.rank - 3];
  params.out_strides[2] = out_strides[q.rank - 2];
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t at = i - (4 - mask.rank);
    params.mask_strides[i] = has_mask && at >= 0 && mask.sizes[at] != 1 ? mask.strides[at] : 0;
  }
  params.scale = static_cast<float>(scale);
  params.reserved = 0;

  const int64_t bytes = element_bytes(params.dtype);
  measure(q, bytes, misalignment, wide);
  measure(k, bytes, misalignment, wide);
  measure(v, bytes, misalignment, wide);
}

Handle Call::empty_output() const {
  const int64_t rank = std::max(q.rank, std::max(k.rank, v.rank));
  Handle out;
  check(aoti_torch_empty_strided(rank, out_sizes, out_strides, q.dtype, q.device_type,
                                 q.device_index, out.receive()),
        "allocating the output");
  return out;
}

Handle Call::empty_lse() const {
  const int64_t sizes[] = {params.batch, params.heads_q, params.seqlen_q};
  const int64_t strides[] = {params.heads_q * params.seqlen_q, params.seqlen_q, 1};
  const int skip = q.rank == 3;
  Handle lse;
  check(aoti_torch_empty_strided(3 - skip, sizes + skip, strides + skip, codes.f32, q.device_type,
                                 q.device_index, lse.receive()),
        "allocating the log-sum-exp");
  return lse;
}

Handle Call::with_output_strides(Handle result) const {
  const int64_t rank = std::max(q.rank, std::max(k.rank, v.rank));
  int64_t* strides;
  int64_t* sizes;
  int64_t dims;
  check(aoti_torch_get_dim(result.get(), &dims), "reading a rank");
  check(aoti_torch_get_sizes(result.get(), &sizes), "reading sizes");
  check(aoti_torch_get_strides(result.get(), &strides), "reading strides");
  bool keep = true, exact = true;
  for (int64_t i = 0; i < rank; ++i) {
    // A mask with more leading dims than the query makes torch.sdpa return those too.
    if (dims != rank || sizes[i] != out_sizes[i]) return result;
    exact &= strides[i] == out_strides[i];
    keep &= sizes[i] == 1 || strides[i] == out_strides[i];
  }
  if (exact) return result;
  Handle out;
  if (keep) {
    check(aoti_torch__reinterpret_tensor(result.get(), rank, out_sizes, out_strides, 0,
                                         out.receive()),
          "viewing the output");
    return out;
  }
  out = empty_output();
  check(aoti_torch_copy_(out.get(), result.get(), 0), "copying the output");
  return out;
}

autofa_key Call::key(bool graph, int32_t flags) const {
  autofa_key key;
  key.device_type = on_cuda() ? 1 : 0;
  key.device_index = q.device_index;
  key.dtype = params.dtype;
  // problem.MASKS: none, causal, causal_lower_right, bool, additive.
  key.mask = params.mask != AUTOFA_MASK_NONE ? 2 + params.mask : params.causal;
  key.head_dim = static_cast<int32_t>(params.head_dim);
  key.head_dim_v = static_cast<int32_t>(params.head_dim_v);
  key.group = static_cast<int32_t>(params.heads_q / params.heads_kv);
  key.batch = bucket(params.batch);
  key.heads_kv = bucket(params.heads_kv);
  key.seqlen_q = bucket(params.seqlen_q);
  key.seqlen_k = bucket(params.seqlen_k);
  key.aligned = (misalignment & 15) == 0;
  key.wide = wide;
  key.graph = graph;
  key.flags = flags;
  if (key.device_type == 0) {
    uint32_t threads = 1;
    check(torch_get_num_threads(&threads), "reading the number of threads");
    key.device_index = static_cast<int32_t>(threads);
  }
  return key;
}

}  // namespace autofa::runtime
