// SPDX-License-Identifier: Apache-2.0
// The maximum of the minimum of linear functions, against all corners and against random points.
#include <catch2/catch.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <remat/bound/concave_model.hpp>

using remat::bound::concave_model;
using point = concave_model::point;

namespace {

struct line {
  double at;
  point slope;
};

double least_of(const std::vector<line>& functions, const point& x) {
  double least = std::numeric_limits<double>::infinity();
  for (const auto& f : functions) {
    double value = f.at;
    for (std::size_t i = 0; i < x.size(); ++i) value += f.slope[i] * x[i];
    least = std::min(least, value);
  }
  return least;
}

/// The minimum of the functions over [0, 1] is largest at an end, or where two functions intersect.
double most_on_a_line(const std::vector<line>& functions) {
  std::vector<double> corners = {0, 1};
  for (const auto& f : functions)
    for (const auto& g : functions)
      if (f.slope[0] != g.slope[0]) corners.push_back((g.at - f.at) / (f.slope[0] - g.slope[0]));
  double most = -std::numeric_limits<double>::infinity();
  for (const double x : corners)
    if (x >= 0 && x <= 1) most = std::max(most, least_of(functions, {x}));
  return most;
}

}  // namespace

TEST_CASE("concave_model in one dimension: the maximum is that of the best corner after each added function") {
  std::mt19937_64 g(1);
  std::uniform_int_distribution<int> number(-4, 4);  // many functions are equal: degenerate
  for (int round = 0; round < 5000; ++round) {
    concave_model m({1});
    std::vector<line> functions;
    for (int i = 0; i < 6; ++i) {
      functions.push_back({static_cast<double>(number(g)), {static_cast<double>(number(g))}});
      m.add(functions.back().at, functions.back().slope);
      const auto [most, at] = m.maximum();
      INFO("round " << round << ", " << i + 1 << " functions");
      REQUIRE(most == Approx(most_on_a_line(functions)).margin(1e-9));
      REQUIRE(at[0] >= -1e-9);
      REQUIRE(at[0] <= 1 + 1e-9);
      REQUIRE(least_of(functions, at) == Approx(most).margin(1e-9));
    }
  }
}

TEST_CASE("concave_model in seven dimensions: a point of the polytope attains the maximum, and no random point exceeds it") {
  std::mt19937_64 g(2);
  std::uniform_int_distribution<int> number(-3, 3);
  std::uniform_real_distribution<double> real(0, 1);
  const point weights = {0, 1, 0, 1, 1, 1, 0};
  const auto weight = [&](const point& x) { return x[1] + x[3] + x[4] + x[5]; };
  double closest = std::numeric_limits<double>::infinity();
  for (int round = 0; round < 1000; ++round) {
    concave_model m({2, 1, 1, 1, 1, 1, 1});
    m.limit(weights, 1);
    std::vector<line> functions;
    for (int i = 0; i < 12; ++i) {
      line f{static_cast<double>(number(g)), {}};
      for (auto& s : f.slope) s = number(g);
      functions.push_back(f);
      m.add(f.at, f.slope);
    }
    const auto [most, at] = m.maximum();
    REQUIRE(least_of(functions, at) == Approx(most).margin(1e-8));
    REQUIRE(weight(at) <= 1 + 1e-9);
    for (std::size_t i = 0; i < at.size(); ++i) {
      REQUIRE(at[i] >= -1e-9);
      REQUIRE(at[i] <= (i == 0 ? 2 : 1) + 1e-9);
    }
    for (int k = 0; k < 300; ++k) {  // points between the maximum and random points of the polytope
      point x{};
      for (auto& c : x) c = real(g);
      x[0] *= 2;
      if (const auto sum = weight(x); sum > 1)
        for (const auto i : {1, 3, 4, 5}) x[static_cast<std::size_t>(i)] /= sum;
      const double step = std::pow(real(g), 4);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = at[i] + step * (x[i] - at[i]);
      const double value = least_of(functions, x);
      REQUIRE(value <= most + 1e-8);
      closest = std::min(closest, most - value);
    }
  }
  CHECK(closest < 1e-3);
}
