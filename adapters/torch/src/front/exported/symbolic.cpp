// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include <remat/pytorch/exported_program.hpp>

#include "arguments.hpp"

namespace remat::pytorch::exported {
namespace {

using numbers = std::vector<at::IValue>;

double real(const at::IValue& v) {
  return v.isDouble() ? v.toDouble() : static_cast<double>(v.isBool() ? static_cast<int64_t>(v.toBool()) : v.toInt());
}
int64_t whole(const at::IValue& v) { return v.isBool() ? static_cast<int64_t>(v.toBool()) : v.toInt(); }
bool any_real(const numbers& n) {
  return std::any_of(n.begin(), n.end(), [](const auto& v) { return v.isDouble(); });
}

/// @throws bad_input
void require_range(bool in_range) {
  if (!in_range) throw bad_input("sizes of the inputs lead to a number beyond 2^63");
}
int64_t sum(int64_t a, int64_t b) {
  int64_t r = 0;
  require_range(!__builtin_add_overflow(a, b, &r));
  return r;
}
int64_t difference(int64_t a, int64_t b) {
  int64_t r = 0;
  require_range(!__builtin_sub_overflow(a, b, &r));
  return r;
}
int64_t product(int64_t a, int64_t b) {
  int64_t r = 0;
  require_range(!__builtin_mul_overflow(a, b, &r));
  return r;
}
/// Rounds down, as Python does.
int64_t quotient(int64_t a, int64_t b) {
  if (b == 0) throw bad_input("sizes of the inputs lead to a division by zero");
  if (b == -1) return difference(0, a);
  return a / b - ((a % b != 0) && ((a < 0) != (b < 0)) ? 1 : 0);
}
int64_t power(int64_t base, int64_t exponent) {
  int64_t r = 1;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) r = product(r, base);
    if (exponent > 1) base = product(base, base);
  }
  return r;
}
/// @throws bad_input if the number is beyond 64 bits
int64_t truncated(double x) {
  require_range(x > -0x1p63 && x < 0x1p63);
  return static_cast<int64_t>(x);
}
double real_quotient(double a, double b) {
  if (b == 0) throw bad_input("sizes of the inputs lead to a division by zero");
  return a / b;
}

template <int64_t (*Whole)(int64_t, int64_t), class Real>
at::IValue arithmetic(const numbers& n, Real of_reals) {
  if (any_real(n)) return of_reals(real(n[0]), real(n[1]));
  return Whole(whole(n[0]), whole(n[1]));
}
template <class Compare>
at::IValue compare(const numbers& n) {
  return any_real(n) ? Compare()(real(n[0]), real(n[1])) : Compare()(whole(n[0]), whole(n[1]));
}
template <class Real>
at::IValue rounded(const numbers& n, Real round) {
  return n[0].isDouble() ? truncated(round(n[0].toDouble())) : whole(n[0]);
}

const std::map<std::string, function_of_sizes>& functions() {
  static const std::map<std::string, function_of_sizes> all = {
      {"_operator.add", {2, [](const numbers& n) { return arithmetic<sum>(n, std::plus<>()); }}},
      {"_operator.sub", {2, [](const numbers& n) { return arithmetic<difference>(n, std::minus<>()); }}},
      {"_operator.mul", {2, [](const numbers& n) { return arithmetic<product>(n, std::multiplies<>()); }}},
      {"_operator.floordiv",
       {2,
        [](const numbers& n) {
          return arithmetic<quotient>(n, [](double a, double b) { return std::floor(real_quotient(a, b)); });
        }}},
      {"_operator.mod",
       {2,
        [](const numbers& n) -> at::IValue {
          if (any_real(n)) return real(n[0]) - std::floor(real_quotient(real(n[0]), real(n[1]))) * real(n[1]);
          const auto a = whole(n[0]), b = whole(n[1]);
          return b == -1 ? 0 : a - quotient(a, b) * b;
        }}},
      {"_operator.truediv", {2, [](const numbers& n) -> at::IValue { return real_quotient(real(n[0]), real(n[1])); }}},
      {"_operator.pow",
       {2,
        [](const numbers& n) -> at::IValue {
          if (any_real(n) || whole(n[1]) < 0) return std::pow(real(n[0]), real(n[1]));
          return power(whole(n[0]), whole(n[1]));
        }}},
      {"_operator.neg",
       {1, [](const numbers& n) -> at::IValue { return any_real(n) ? at::IValue(-real(n[0])) : difference(0, whole(n[0])); }}},
      {"_operator.pos", {1, [](const numbers& n) { return n[0]; }}},
      {"_operator.eq", {2, compare<std::equal_to<>>}},
      {"_operator.ne", {2, compare<std::not_equal_to<>>}},
      {"_operator.lt", {2, compare<std::less<>>}},
      {"_operator.le", {2, compare<std::less_equal<>>}},
      {"_operator.gt", {2, compare<std::greater<>>}},
      {"_operator.ge", {2, compare<std::greater_equal<>>}},
      {"_operator.and_",
       {2,
        [](const numbers& n) -> at::IValue {
          const auto both = whole(n[0]) & whole(n[1]);
          return n[0].isBool() && n[1].isBool() ? at::IValue(both != 0) : both;
        }}},
      {"_operator.or_",
       {2,
        [](const numbers& n) -> at::IValue {
          const auto either = whole(n[0]) | whole(n[1]);
          return n[0].isBool() && n[1].isBool() ? at::IValue(either != 0) : either;
        }}},
      {"math.trunc", {1, [](const numbers& n) { return rounded(n, [](double x) { return std::trunc(x); }); }}},
      {"math.floor", {1, [](const numbers& n) { return rounded(n, [](double x) { return std::floor(x); }); }}},
      {"math.ceil", {1, [](const numbers& n) { return rounded(n, [](double x) { return std::ceil(x); }); }}},
      {"torch.sym_int", {1, [](const numbers& n) { return rounded(n, [](double x) { return std::trunc(x); }); }}},
      {"torch.sym_float", {1, [](const numbers& n) -> at::IValue { return real(n[0]); }}},
      {"torch.sym_not", {1, [](const numbers& n) -> at::IValue { return whole(n[0]) == 0; }}},
      {"torch.sym_max",
       {2,
        [](const numbers& n) -> at::IValue {
          if (any_real(n)) return std::max(real(n[0]), real(n[1]));
          return std::max(whole(n[0]), whole(n[1]));
        }}},
      {"torch.sym_min",
       {2,
        [](const numbers& n) -> at::IValue {
          if (any_real(n)) return std::min(real(n[0]), real(n[1]));
          return std::min(whole(n[0]), whole(n[1]));
        }}},
      {"torch.sym_ite", {3, [](const numbers& n) { return whole(n[0]) != 0 ? n[1] : n[2]; }}},
      {"torch._sym_sqrt", {1, [](const numbers& n) -> at::IValue { return std::sqrt(real(n[0])); }}}};
  return all;
}

}  // namespace

const function_of_sizes* find_symbolic(const std::string& target) {
  const auto found = functions().find(target);
  return found == functions().end() ? nullptr : &found->second;
}

}  // namespace remat::pytorch::exported
