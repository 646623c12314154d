// How warpgroups of one thread block may share out registers by setmaxnreg.
#pragma once

namespace autofa {

// Whether a block whose `consumers` warpgroups take `most` registers a thread, and whose producer
// keeps `least`, has so many: the launch gives all warpgroups alike, in steps of 8 a thread, out of
// the SM's 64 Ki. Whoever takes more than is left waits for ever.
constexpr bool registers_suffice(int consumers, int most, int least) {
  const int warpgroups = consumers + 1;
  return consumers * most + least <= 65536 / (128 * warpgroups) / 8 * 8 * warpgroups;
}

}  // namespace autofa
