"""Variant libraries for the runtime's tests, compiled here from a few lines each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from autofa.resources import csrc_dir
from autofa.runtime import extension

NAIVE = """
template <class T> float load(const void* p, int64_t i) {
  return static_cast<float>(static_cast<const T*>(p)[i]);
}
struct Work { const autofa_params* p; };
// Attention of one (batch, head) per index, straight from the definition.
void heads(int64_t begin, int64_t end, void* arg) {
  const autofa_params& p = *static_cast<Work*>(arg)->p;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / p.heads_q, h = i % p.heads_q, g = h / (p.heads_q / p.heads_kv);
    const float* q = static_cast<const float*>(p.q) + b * p.q_strides[0] + h * p.q_strides[1];
    const float* k = static_cast<const float*>(p.k) + b * p.k_strides[0] + g * p.k_strides[1];
    const float* v = static_cast<const float*>(p.v) + b * p.v_strides[0] + g * p.v_strides[1];
    float* out = static_cast<float*>(p.out) + b * p.out_strides[0] + h * p.out_strides[1];
    const int64_t mask_at = b * p.mask_strides[0] + h * p.mask_strides[1];
    for (int64_t r = 0; r < p.seqlen_q; ++r) {
      const int64_t corner = p.causal == AUTOFA_CAUSAL_LOWER_RIGHT ? p.seqlen_k - p.seqlen_q : 0;
      double sum = 0, top = -INFINITY;
      std::vector<double> weight(p.seqlen_k, -INFINITY);
      for (int64_t c = 0; c < p.seqlen_k; ++c) {
        if (p.causal && c > r + corner) continue;
        const int64_t at = mask_at + r * p.mask_strides[2] + c * p.mask_strides[3];
        if (p.mask == AUTOFA_MASK_BOOL && !static_cast<const bool*>(p.attn_mask)[at]) continue;
        double dot = 0;
        for (int64_t d = 0; d < p.head_dim; ++d)
          dot += double(q[r * p.q_strides[2] + d]) * k[c * p.k_strides[2] + d];
        weight[c] = dot * p.scale;
        if (p.mask == AUTOFA_MASK_ADDITIVE) weight[c] += static_cast<const float*>(p.attn_mask)[at];
        top = std::max(top, weight[c]);
      }
      for (double& w : weight) { w = top == -INFINITY ? 0 : std::exp(w - top); sum += w; }
      if (p.lse) p.lse[(b * p.heads_q + h) * p.seqlen_q + r] = std::log(sum) + top;
      for (int64_t d = 0; d < p.head_dim_v; ++d) {
        double total = 0;
        for (int64_t c = 0; c < p.seqlen_k; ++c)
          if (weight[c]) total += weight[c] * v[c * p.v_strides[2] + d];
        out[r * p.out_strides[2] + d] = sum ? total / sum : 0;
      }
    }
  }
}
int32_t run(const autofa_params& p, const autofa_executor& e) {
  if (p.dtype != AUTOFA_F32) return AUTOFA_REFUSED;
  Work work{&p};
  return e.parallel_for(0, p.batch * p.heads_q, 1, heads, &work);
}
"""
CONSTANT = """
int32_t run(const autofa_params& p, const autofa_executor& e) {
  // Through the workspace, so that one that is missing or misaligned is found.
  float* seven = static_cast<float*>(p.workspace);
  if (reinterpret_cast<uintptr_t>(seven) % 64) return AUTOFA_REFUSED;
  *seven = 7;
  for (int64_t i = 0; i < p.batch * p.heads_q * p.seqlen_q * p.head_dim_v; ++i)
    static_cast<float*>(p.out)[i] = *seven;
  return AUTOFA_OK;
}
"""
REFUSES = "int32_t run(const autofa_params&, const autofa_executor&) { return AUTOFA_REFUSED; }"
BREAKS = "int32_t run(const autofa_params&, const autofa_executor&) { return 700; }"

_STUB = """
#include <algorithm>
#include <cmath>
#include <vector>
#include "autofa/export.h"
namespace {{
{body}
struct Kernel {{
  static constexpr int threads = 0, smem_bytes = 0;
  static int32_t launch(const autofa_params& p, const autofa_executor& e, void*) {{
    return run(p, e);
  }}
  static int64_t workspace_bytes(const autofa_params&) {{ return {workspace}; }}
}};
}}
AUTOFA_EXPORT_VARIANT(Kernel)
"""


def compiler() -> str:
    """g++, or a skip that says why."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++ on PATH")
    return found


def build(
    folder: Path, slug: str, body: str, *, workspace: int = 0, flags: tuple[str, ...] = ()
) -> Path:
    """A variant library whose launch is `run` of `body`."""
    source = folder / f"{slug}.cpp"
    source.write_text(_STUB.format(body=body, workspace=workspace))
    library = folder / f"{slug}.so"
    names = {"SLUG": slug, "FINGERPRINT": "f", "TARGET": "x86-64-v3", "COMPILER": "g++"}
    subprocess.run(
        [
            compiler(),
            *("-std=c++17", "-O1", "-fPIC", "-shared", f"-I{csrc_dir() / 'include'}"),
            *(f'-DAUTOFA_{name}="{text}"' for name, text in names.items()),
            *flags,
            *(str(source), "-o", str(library)),
        ],
        check=True,
    )
    return library


def require_runtime() -> None:
    """Skips where the operator was not built."""
    reason = extension.reason()
    if reason is not None:
        pytest.skip(reason)
