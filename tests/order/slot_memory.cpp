// SPDX-License-Identifier: Apache-2.0
// `slot_memory` against a plain list of bytes per slot.
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <vector>

#include <remat/order/slot_memory.hpp>
#include <remat/testing/generators.hpp>

using remat::bytes_t;
using remat::order::slot_memory;
using remat::testing::chance;
using remat::testing::uniform;

TEST_CASE("slot_memory agrees with a plain list") {
  std::mt19937_64 g(3);
  constexpr auto empty = slot_memory::empty;
  constexpr std::size_t slots = 5 * slot_memory::block;
  std::vector<bytes_t> plain(slots);
  for (std::size_t k = 0; k < slots; ++k) plain[k] = k / slot_memory::block != 3 && chance(g, 50) ? uniform(g, 0, 50) : -empty;
  slot_memory memory;
  memory.load(plain);
  const auto any = [&](std::size_t first) {
    return static_cast<std::size_t>(uniform(g, static_cast<std::int64_t>(first), static_cast<std::int64_t>(slots)));
  };
  for (int round = 0; round < 500; ++round) {
    const auto from = any(0), to = any(from);
    const auto bytes = uniform(g, -20, 30), limit = uniform(g, 0, 100);
    memory.add(bytes, from, to);
    for (auto k = from; k < to; ++k) plain[k] += bytes;
    if (from < slots) {
      plain[from] = chance(g, 50) ? uniform(g, 0, 50) : -empty;
      memory.set(from, plain[from]);
      memory.update_maxima(from, from + 1);
    }

    std::vector<std::size_t> over, known;
    for (std::size_t k = 0; k < slots; ++k) {
      REQUIRE(memory.at(k) == plain[k]);
      if (plain[k] > limit) known.push_back(k);
    }
    memory.find_above(limit, over);
    CHECK(over == known);
    CHECK(memory.peak() == std::max<bytes_t>(0, *std::max_element(plain.begin(), plain.end())));
    const auto first = std::find_if(plain.begin() + static_cast<std::ptrdiff_t>(from),
                                    plain.begin() + static_cast<std::ptrdiff_t>(to), [&](bytes_t b) { return b > limit; });
    CHECK(memory.first_above(limit, from, to) == static_cast<std::size_t>(first - plain.begin()));
    bytes_t raised = 0;
    for (auto k = from; k < to; ++k)
      raised += std::max<bytes_t>(0, plain[k] + 10 - limit) - std::max<bytes_t>(0, plain[k] - limit);
    auto summed = from;
    CHECK(memory.added_excess(10, summed, to, limit, 1e300) == static_cast<double>(raised));
    CHECK(summed == to);
    for (std::size_t k = 0; k < slots; k += slot_memory::block)
      CHECK(memory.is_empty_block(k) == std::all_of(plain.begin() + static_cast<std::ptrdiff_t>(k),
                                                    plain.begin() + static_cast<std::ptrdiff_t>(k + slot_memory::block),
                                                    [](bytes_t b) { return b < 0; }));
  }
}
