// SPDX-License-Identifier: Apache-2.0
// Kernels that compute only the geometry of results, compared with the kernels of the host.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <functional>
#include <map>
#include <set>

#include "../src/capture/known_results.hpp"
#include "../src/capture/lists.hpp"
#include "../src/capture/meta_kernels.hpp"

namespace meta_kernel_tests {  // a namespace of its own, because sources are compiled as one
namespace {

namespace rpd = remat::pytorch::detail;
using stack = std::vector<c10::IValue>;
using at::Tensor;

/// The layout of a tensor in memory.
enum class arrangement { plain, transposed, channels_last, gaps, transposed_gaps, expanded };
constexpr auto layouts = {arrangement::plain, arrangement::transposed,      arrangement::channels_last,
                          arrangement::gaps,  arrangement::transposed_gaps, arrangement::expanded};

/// Makes operands of one type, all in the given layout where their sizes permit it.
struct maker {
  arrangement how;
  at::ScalarType type;

  Tensor operator()(std::vector<int64_t> sizes) const { return made(std::move(sizes), type); }
  Tensor whole(std::vector<int64_t> sizes) const { return at::rand(sizes).to(type); }
  Tensor positions(std::vector<int64_t> sizes) const { return at::zeros(sizes, at::kLong); }
  static Tensor made_with_gaps(std::vector<int64_t> sizes, at::ScalarType of) {
    const auto n = sizes.back();
    sizes.back() *= 3;
    return at::rand(sizes).to(of).narrow(-1, n, n);
  }
  Tensor made(std::vector<int64_t> sizes, at::ScalarType of) const {
    const auto n = sizes.size();
    if (how == arrangement::transposed && n >= 2) {
      std::swap(sizes[n - 1], sizes[n - 2]);
      return at::rand(sizes).to(of).transpose(-1, -2);
    }
    if (how == arrangement::channels_last && n == 4) return at::rand(sizes).to(of).contiguous(at::MemoryFormat::ChannelsLast);
    if (how == arrangement::gaps && n >= 1) return made_with_gaps(sizes, of);
    if (how == arrangement::transposed_gaps && n >= 2) {  // as the heads of attention in one product
      std::swap(sizes[n - 2], sizes[n >= 3 ? n - 3 : n - 1]);
      auto t = made_with_gaps(sizes, of);
      return n >= 3 ? t.transpose(-2, -3) : t.transpose(-1, -2);
    }
    if (how == arrangement::expanded && n >= 2) {
      auto all = sizes;
      sizes[0] = 1;
      return at::rand(sizes).to(of).expand(all);
    }
    return at::rand(sizes).to(of);
  }
};

const c10::IValue nothing;

/// Arguments for each operator with a geometry kernel.
std::map<std::string, std::vector<stack>> cases(const maker& m, const std::vector<int64_t>& image) {
  using c10::List;
  const std::vector<int64_t> matrix{4, 6};
  std::map<std::string, std::vector<stack>> all;
  for (const auto* name : {"neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "cos", "sin", "erf", "sigmoid", "tanh", "silu",
                           "sgn", "sign", "floor", "round", "hardswish"})
    for (const auto& sizes : {image, matrix, std::vector<int64_t>{}}) all[name].push_back({m(sizes)});
  for (const auto& sizes : {image, matrix}) {
    all["bernoulli_.float"].push_back({m(sizes), 0.1, nothing});
    all["uniform_"].push_back({m(sizes), -1.0, 1.0, nothing});
    all["normal_"].push_back({m(sizes), 0.0, 1.0, nothing});
    for (const auto* name : {"rand_like", "randn_like"})
      all[name].push_back({m(sizes), nothing, nothing, nothing, nothing, nothing});
  }
  all["bitwise_not"] = {{m(matrix) > 0.5}};
  for (const auto* name :
       {"maximum", "minimum", "eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor", "mul.Tensor",
        "div.Tensor", "pow.Tensor_Tensor", "sigmoid_backward", "tanh_backward", "silu_backward"}) {
    all[name] = {{m(image), m(image)}, {m(image), m.whole({3, 1, 8})}, {m.whole(matrix), m(matrix)}, {m(matrix), m.whole({})}};
    if (std::string(name).find("backward") == std::string::npos) all[name].push_back({m(image), at::rand({6, 1})});
  }
  for (const auto* name : {"bitwise_and.Tensor", "bitwise_or.Tensor"}) all[name] = {{m(image) > 0.5, m.whole({6, 1}) > 0.5}};
  for (const auto* name : {"add.Tensor", "sub.Tensor"})
    all[name] = {{m(image), m(image), 1}, {m(image), m.whole({3, 1, 8}), 2}, {m(matrix), at::rand({6}), 1}};
  for (const auto* name : {"add_.Tensor", "sub_.Tensor"})
    if (m.how != arrangement::expanded) all[name] = {{m(image), m(image), 1}, {m(image), m.whole({3, 1, 8}), 2}};
  for (const auto* name : {"mul_.Tensor", "div_.Tensor"})
    if (m.how != arrangement::expanded) all[name] = {{m(image), m(image)}, {m(image), m.whole({3, 1, 8})}};
  for (const auto* name : {"mul.Scalar", "div.Scalar", "pow.Tensor_Scalar", "eq.Scalar", "ne.Scalar", "lt.Scalar", "le.Scalar",
                           "gt.Scalar", "ge.Scalar"})
    all[name] = {{m(image), 2}, {m(matrix), 1.5}, {m.positions(matrix), 2}};
  for (const auto* name : {"mul_.Scalar", "div_.Scalar"})
    if (m.how != arrangement::expanded) all[name] = {{m(image), 1.5}};
  all["pow.Scalar"] = {{2, m(matrix)}};
  for (const auto* name : {"add.Scalar", "sub.Scalar"}) all[name] = {{m(image), 2, 1}, {m.positions(matrix), 1.5, 1}};
  all["gelu"] = {{m(image), "none"}, {m(matrix), "tanh"}};
  all["gelu_backward"] = {{m(image), m(image), "none"}, {m.whole(matrix), m(matrix), "tanh"}};
  all["elu"] = {{m(image), 1.0, 1.0, 1.0}};
  all["threshold_backward"] = {{m(image), m(image), 0}, {m.whole(matrix), m(matrix), 0}};
  all["leaky_relu_backward"] = {{m(image), m(image), 0.1, false}};

  all["mm"] = {{m(matrix), m({6, 5})}};
  all["bmm"] = {{m({2, 4, 6}), m({2, 6, 5})}};
  all["addmm"] = {{m.whole({5}), m(matrix), m({6, 5}), 1, 1}};
  all["baddbmm"] = {{m({2, 4, 5}), m({2, 4, 6}), m({2, 6, 5}), 1, 1}};
  const auto dims = [](std::initializer_list<int64_t> d) { return List<int64_t>(d); };
  for (const auto* name : {"sum.dim_IntList", "mean.dim"})
    all[name] = {{m(image), dims({1}), false, nothing},
                 {m(image), dims({0, 2, 3}), true, nothing},
                 {m(image), nothing, false, nothing},
                 {m(matrix), dims({-1}), true, at::kDouble}};
  for (const auto* name : {"sum", "mean"}) all[name] = {{m(image), nothing}, {m(matrix), at::kDouble}, {m({}), nothing}};
  all["sum"].push_back({m(matrix) > 0.5, nothing});
  for (const auto* name : {"amax", "amin"}) all[name] = {{m(image), dims({1, -1}), false}, {m(image), dims({2}), true}};
  all["cumsum"] = {{m(image), 1, nothing}};
  all["prod.dim_int"] = {{m(image), 1, false, nothing}};
  for (const auto* name : {"any.dim", "all.dim"}) all[name] = {{m(image) > 0.5, 1, false}};
  for (const auto* name : {"argmax", "argmin"}) all[name] = {{m(image), 1, false}, {m(image), nothing, false}};
  all["linalg_vector_norm"] = {{m(image), 2, dims({1}), true, nothing}, {m(image), 2, nothing, false, nothing}};
  for (const auto* name : {"_softmax", "_log_softmax"}) all[name] = {{m(image), 1, false}, {m(matrix), -1, false}};
  for (const auto* name : {"_softmax_backward_data", "_log_softmax_backward_data"})
    all[name] = {{m(image), m(image), 1, m.type}, {m.whole(matrix), m(matrix), -1, m.type}};
  const auto total = at::ones({}).to(m.type);
  for (int reduction : {0, 1}) {
    all["nll_loss_forward"].push_back({m(matrix), m.positions({4}), nothing, reduction, -100});
    all["nll_loss_backward"].push_back(
        {reduction ? m.whole({}) : m.whole({4}), m(matrix), m.positions({4}), nothing, reduction, -100, total});
    all["mse_loss"].push_back({m(image), m(image), reduction});
    all["smooth_l1_loss"].push_back({m(image), m(image), reduction, 1.0});
  }
  all["cat"] = {{std::vector{m(image), m(image)}, 1},
                {std::vector{m.whole(image), m(image)}, 0},
                {std::vector{m(matrix), m.whole({0})}, 0}};
  for (const auto* name : {"tril", "triu"}) all[name] = {{m(matrix), 1}};
  all["topk"] = {{m(matrix), 2, 1, true, true}};
  all["sort.stable"] = {{m(matrix), true, -1, false}};

  const auto at_positions = [](std::vector<Tensor> ts) {
    List<std::optional<Tensor>> l;
    for (auto& t : ts) l.push_back(t.defined() ? std::optional(t) : std::nullopt);
    return l;
  };
  all["index.Tensor"] = {{m(image), at_positions({Tensor(), m.positions({5})})},
                         {m(image), at_positions({m.positions({5}), Tensor(), m.positions({4, 5})})}};
  all["index_select"] = {{m(image), 1, m.positions({5})}, {m(matrix), -1, m.positions({})}};
  all["gather"] = {{m(matrix), 1, m.positions({4, 2})}};
  if (m.how != arrangement::expanded) {
    all["index_add_"] = {{m(matrix), 0, m.positions({3}), m({3, 6}), 1}};
    all["scatter_add_"] = {{m(matrix), 0, m.positions({3, 6}), m({3, 6})}};
    all["_index_put_impl_"] = {{m(matrix), at_positions({m.positions({5})}), m({5, 6}), true, false}};
  }
  all["scatter_add"] = {{m(matrix), 0, m.positions({3, 6}), m({3, 6})}};
  all["scatter.src"] = {{m(matrix), 0, m.positions({3, 6}), m({3, 6})}};
  all["scatter.value"] = {{m(matrix), 0, m.positions({3, 6}), 1.0}};
  all["index_copy"] = {{m(matrix), 0, m.positions({1}), m({1, 6})}};
  all["embedding"] = {{m(matrix), m.positions({2, 3}), -1, false, false}};
  all["embedding_dense_backward"] = {{m({2, 3, 6}), m.positions({2, 3}), 4, -1, false}};
  all["slice_backward"] = {{m({2, 3, 6, 3}), dims({2, 3, 6, 8}), 3, 1, 4, 1}};
  all["select_backward"] = {{m({2, 6, 8}), dims({2, 3, 6, 8}), 1, 1}};

  all["max_pool2d_with_indices"] = {{m(image), dims({2, 2}), dims({2, 2}), dims({0, 0}), dims({1, 1}), false}};
  all["max_pool2d_with_indices_backward"] = {
      {m({2, 3, 3, 4}), m(image), dims({2, 2}), dims({2, 2}), dims({0, 0}), dims({1, 1}), false, m.positions({2, 3, 3, 4})}};
  all["avg_pool2d"] = {{m(image), dims({2, 2}), dims({2, 2}), dims({0, 0}), false, true, nothing}};
  all["avg_pool2d_backward"] = {{m({2, 3, 3, 4}), m(image), dims({2, 2}), dims({2, 2}), dims({0, 0}), false, true, nothing}};
  all["upsample_nearest2d"] = {{m(image), dims({12, 16}), nothing, nothing}};
  all["upsample_nearest2d_backward"] = {{m({2, 3, 12, 16}), dims({12, 16}), dims({2, 3, 6, 8}), nothing, nothing}};
  all["upsample_bilinear2d"] = {{m(image), dims({12, 16}), false, nothing, nothing}};
  all["upsample_bilinear2d_backward"] = {{m({2, 3, 12, 16}), dims({12, 16}), dims({2, 3, 6, 8}), false, nothing, nothing}};

  all["clone"] = {{m(image), nothing}, {m(image), at::MemoryFormat::Contiguous}, {m(matrix), at::MemoryFormat::Preserve}};
  all["_to_copy"] = {{m(image), at::kDouble, nothing, nothing, nothing, false, nothing},
                     {m(matrix), at::kHalf, nothing, at::Device(at::kCPU), nothing, false, at::MemoryFormat::Contiguous}};
  const auto heads = [&](int64_t rows) { return m({2, 3, rows, 8}); };
  all["_scaled_dot_product_flash_attention_for_cpu"] = {{heads(6), heads(6), heads(6), 0.0, true, nothing, nothing},
                                                        {heads(6), heads(5), heads(5), 0.0, false, nothing, nothing}};
  const auto attended = [&] { return at::rand({2, 6, 3, 8}).to(m.type).transpose(1, 2); };
  all["_scaled_dot_product_flash_attention_for_cpu_backward"] = {
      {attended(), heads(6), heads(5), heads(5), attended(), at::rand({2, 6, 3}).transpose(1, 2), 0.0, false, nothing, nothing}};
  all["native_layer_norm"] = {{m(image), dims({8}), m.whole({8}), m.whole({8}), 1e-5},
                              {m(image), dims({6, 8}), nothing, nothing, 1e-5},
                              {m(matrix), dims({6}), at::rand({6}), at::rand({6}), 1e-5}};
  for (const auto* name : {"empty_like", "zeros_like", "ones_like"})
    for (const auto& t : {m(image), m(matrix)})
      all[name].insert(all[name].end(), {{t, nothing, nothing, nothing, nothing, nothing},
                                         {t, at::kDouble, nothing, at::Device(at::kCPU), false, at::MemoryFormat::Contiguous}});
  all["full_like"] = {{m(image), 2, nothing, nothing, nothing, nothing, nothing}};
  for (const auto* name : {"new_empty", "new_zeros", "new_ones"})
    all[name] = {{m(image), dims({3, 4}), nothing, nothing, nothing, nothing}};
  all["new_full"] = {{m(image), dims({3, 4}), 2, at::kLong, nothing, nothing, nothing}};

  const auto mask = [](bool a, bool b, bool c) { return List<bool>({a, b, c}); };
  const auto mean = m.whole({2, 3, 6, 1});
  all["native_layer_norm_backward"] = {
      {m(image), m(image), dims({8}), mean, mean, m.whole({8}), m.whole({8}), mask(true, true, true)},
      {m(image), m(image), dims({8}), mean, mean, nothing, nothing, mask(true, false, false)}};
  // Under autocast, parameters and statistics have other types than images.
  const auto pixel = m.whole({2, 3, 1, 1}).as_strided({2, 3, 1, 1}, {3, 1, 3, 3});
  for (const auto of : {m.type, at::kFloat}) {
    const auto three = at::rand({3}).to(of);
    for (const bool training : {true, false}) {
      for (const auto& t : {m(image), pixel}) {
        all["native_batch_norm"].push_back({t, three, three, at::rand({3}).to(of), at::rand({3}).to(of), training, 0.1, 1e-5});
        all["native_batch_norm_backward"].push_back(
            {t, t, three, three, three, three, three, training, 1e-5, mask(true, true, training)});
      }
    }
    const auto six = at::rand({6}).to(of), groups = at::rand({2, 3}).to(of);
    all["native_group_norm"].push_back({m({2, 6, 4, 8}), six, six, 2, 6, 32, 3, 1e-5});
    all["native_group_norm_backward"].push_back(
        {m.whole({2, 6, 4, 8}), m.whole({2, 6, 4, 8}), groups, groups, six, 2, 6, 32, 3, mask(true, true, true)});
  }
  all["native_batch_norm"].push_back({m(image), nothing, nothing, nothing, nothing, true, 0.1, 1e-5});

  struct shape {
    std::vector<int64_t> in, kernel;
    int64_t stride, padding, groups;
    bool transposed;
  };
  for (const auto& s : std::vector<shape>{{{2, 3, 6, 8}, {5, 3, 3, 3}, 1, 1, 1, false},
                                          {{1, 3, 6, 8}, {5, 3, 1, 1}, 2, 0, 1, false},
                                          {{4, 8, 40, 40}, {8, 8, 3, 3}, 2, 1, 1, false},
                                          {{4, 8, 40, 40}, {8, 1, 3, 3}, 1, 1, 8, false},
                                          {{2, 4, 5, 6}, {4, 3, 2, 2}, 2, 0, 1, true},
                                          {{2, 4, 16}, {6, 4, 3}, 1, 1, 1, false},
                                          {{2, 3, 4, 5, 6}, {5, 3, 3, 3, 3}, 1, 1, 1, false}}) {
    const auto n = s.in.size() - 2;
    const auto each = [&](int64_t x) {
      List<int64_t> l;
      for (std::size_t i = 0; i < n; ++i) l.push_back(x);
      return l;
    };
    const auto channels = s.transposed ? s.kernel[1] * s.groups : s.kernel[0];
    const auto in = m(s.in), kernel = m.whole(s.kernel), bias = m.whole({channels});
    const stack rest{each(s.stride), each(s.padding), each(1), s.transposed, each(0), s.groups};
    stack forward{in, kernel, bias};
    forward.insert(forward.end(), rest.begin(), rest.end());
    all["convolution"].push_back(forward);
    at::Tensor out;
    try {
      auto run = forward;
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "").callBoxed(&run);
      out = run[0].toTensor();
    } catch (const c10::Error&) {
      continue;
    }
    for (const bool input : {true, false}) {
      stack backward{at::rand_like(out), in, kernel, dims({channels})};
      backward.insert(backward.end(), rest.begin(), rest.end());
      backward.push_back(mask(input, true, true));
      all["convolution_backward"].push_back(backward);
    }
  }
  return all;
}

/// All cases for several images. Operators refuse some of them.
std::map<std::string, std::vector<stack>> cases_of(const std::vector<std::vector<int64_t>>& images, const maker& m) {
  std::map<std::string, std::vector<stack>> all;
  for (const auto& image : images)
    for (auto& [name, list] : cases(m, image)) all[name].insert(all[name].end(), list.begin(), list.end());
  return all;
}

/// A call in the form of the recorder, and its operands.
std::pair<rpd::traced_call, std::vector<Tensor>> called(const c10::OperatorHandle& op, const stack& arguments) {
  rpd::traced_call c{op, {}, {}, {}, false, {}, {}};
  std::vector<Tensor> operands;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    auto v = arguments[i];
    rpd::each_tensor(arguments[i], [&](const Tensor& t, int element) {
      rpd::traced_tensor o{};
      o.at = static_cast<int>(i);
      o.element = element;
      c.operands.push_back(o);
      operands.push_back(t);
      if (element >= 0) {
        auto l = v.toList().copy();
        l.set(static_cast<std::size_t>(element), Tensor());
        v = l;
      }
    });
    c.arguments.push_back(v.isTensor() ? c10::IValue(Tensor()) : v);
  }
  return {std::move(c), std::move(operands)};
}

}  // namespace

TEST_CASE("geometry kernels agree with the kernels of the host", "[meta_kernels]") {
  const at::NoGradGuard no_grad;
  std::set<std::string> tried;
  std::size_t deduced = 0, kept = 0;
  const std::vector<std::vector<int64_t>> images{{2, 3, 6, 8}, {2, 3, 1, 1}, {1, 3, 1, 8}};
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble})
    for (const auto how : layouts)
      for (const auto& [name, list] : cases_of(images, {how, type})) {
        tried.insert("aten::" + name);
        for (const auto& arguments : list) {
          const auto dot = name.find('.');
          const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name.substr(0, dot)).c_str(),
                                                                         dot == name.npos ? "" : name.substr(dot + 1).c_str());
          INFO(name << " " << type << " arrangement " << static_cast<int>(how));
          const auto [c, operands] = called(op, arguments);
          const auto results = rpd::deduced(c, operands);
          auto real = arguments;
          const auto before = at::globalContext().defaultGenerator(at::kCPU).get_state();
          try {
            const at::AutoDispatchBelowADInplaceOrView below;
            op.callBoxed(&real);
          } catch (const c10::Error&) {
            continue;  // the host has no kernel for this type or image
          }
          if (!results) {
            ++kept;
            CHECK(how != arrangement::plain);
            continue;
          }
          ++deduced;
          CHECK(results->draws != at::equal(before, at::globalContext().defaultGenerator(at::kCPU).get_state()));
          const auto known = results->made_for(operands);
          REQUIRE(known.size() == real.size());
          for (std::size_t i = 0; i < real.size(); ++i) {
            const Tensor want = real[i].toTensor(), have = known[i].toTensor();
            REQUIRE(want.defined() == have.defined());
            if (!want.defined()) continue;
            INFO("result " << i << ": " << want.sizes() << " " << want.strides() << ", not " << have.sizes() << " "
                           << have.strides());
            CHECK(want.sizes() == have.sizes());
            CHECK(want.strides() == have.strides());
            CHECK(want.scalar_type() == have.scalar_type());
            CHECK(want.device() == have.device());
            CHECK(want.storage().nbytes() == have.storage().nbytes());
            CHECK(want.storage_offset() == have.storage_offset());
            for (const auto& t : operands) CHECK(want.is_same(t) == have.is_same(t));
          }
        }
      }
  CHECK(deduced > 1000);
  CHECK(kept < deduced / 20);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (const auto op = c10::Dispatcher::singleton().findSchema(name); op && rpd::meta_kernel(*op, c10::kCPU) != nullptr)
      CHECK(tried.count(c10::toString(name)) == 1);
}

}  // namespace meta_kernel_tests
