// SPDX-License-Identifier: Apache-2.0
// Captured programs against eager mode.

#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/io.hpp>

#include "../src/program/fold.hpp"
#include "captured_nodes.hpp"
#include "compare.hpp"
#include "interpret.hpp"
#include "models.hpp"

using namespace capture_tests;

TEST_CASE("recomputing any node of a captured program changes no bit of the step", "[device]") {
  const on_test_device there;
  at::set_num_threads(1);
  torch::manual_seed(1);
  for (const auto& s : models::all()) {
    DYNAMIC_SECTION(s.name) {
      const world before(*s.module);
      const auto p = check_against_eager(s);
      // Negative control: another seed changes the gradients of a random program.
      const auto one = interpreted(p, s, s.inputs, 7, interpreter::recompute::nothing);
      restore_buffers(*s.module, before.buffers);
      const auto other = interpreted(p, s, s.inputs, 8, interpreter::recompute::nothing);
      restore_buffers(*s.module, before.buffers);
      const bool random = std::any_of(p.step->nodes.begin(), p.step->nodes.end(), [](const auto& n) { return n.random; });
      CHECK(same_bits(one.parameter_grads, other.parameter_grads) != random);
    }
  }
}

TEST_CASE("capture: draws, constants, lists, writes in place, outputs and layouts of modules") {
  torch::manual_seed(2);
  auto generator = at::detail::getDefaultCPUGenerator();
  auto bn = std::make_shared<torch::nn::BatchNorm1dImpl>(6);
  const std::vector<models::sample> samples = {
      small("a draw that nothing reads",
            [](auto& m, auto& x) -> tensors {
              torch::rand({3});
              return {torch::dropout(x[0].matmul(weight(m)), 0.5, true)};
            }),
      small("draws repeated by hand, as checkpointing does",
            [generator](auto& m, auto& x) mutable -> tensors {
              const auto start = generator.get_state();
              const auto a = torch::dropout(x[0].matmul(weight(m)), 0.5, true);
              const auto end = generator.get_state();
              generator.set_state(start);
              const auto b = torch::dropout(x[0].matmul(weight(m)), 0.5, true);
              generator.set_state(end);
              return {torch::dropout(a * b, 0.5, true)};
            }),
      small("a seed of its own",
            [](auto& m, auto& x) -> tensors {
              auto a = torch::dropout(x[0].matmul(weight(m)), 0.5, true);
              torch::manual_seed(3);
              return {torch::dropout(a.sin(), 0.5, true)};
            }),
      small("constants",
            [](auto& m, auto& x) -> tensors {
              auto c = torch::tensor({1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F});
              auto d = torch::tensor(0.5F);
              c.add_(d);
              float raw[6] = {6, 5, 4, 3, 2, 1};
              auto e = torch::from_blob(raw, {6}) * 2;
              auto filled = torch::empty({6});
              for (int i = 0; i < 6; ++i) filled.template data_ptr<float>()[i] = static_cast<float>(i);
              return {x[0].matmul(weight(m)).sigmoid() * c + e * filled};
            }),
      small("a constant decides a branch",
            [](auto& m, auto& x) -> tensors {
              auto y = x[0].matmul(weight(m));
              return {torch::arange(3).sum().template item<int64_t>() == 3 ? y.exp() : y.sin()};
            }),
      small("lists",
            [](auto& m, auto& x) -> tensors {
              auto parts = x[0].matmul(weight(m)).split({2, 4}, 1);
              auto rows = parts[1].unbind(0);
              auto joined = torch::cat({parts[0].sin(), torch::stack({rows[3], rows[0], rows[1], rows[2]})}, 1);
              auto index = torch::tensor({2, 0, 0});
              return {joined.index({index, torch::indexing::Slice(1, 4)}), joined.index({torch::indexing::Slice(), index})};
            }),
      small("writes in place",
            [](auto& m, auto& x) -> tensors {
              auto y = x[0].matmul(weight(m));
              auto z = (y * 2).sin();
              y.slice(0, 1, 3).add_(z.slice(0, 0, 2));
              auto zeros = torch::zeros({4, 6});
              zeros.select(1, 2).copy_(y.select(1, 0));
              zeros.select(1, 3).copy_(z.select(1, 0));
              auto list = tensors{z * 2, y * 3};
              at::_foreach_mul_(list, 0.5);
              return {zeros.exp() + y.cos() + list[0] * list[1], y.detach().clone().neg_()};
            }),
      small("an input written in place",
            [](auto& m, auto& x) -> tensors {
              auto y = x[0].sin();
              x[0].relu_();
              return {x[0].matmul(weight(m)).exp() + y};
            }),
      small("a buffer read, written and read again",
            [](auto& m, auto& x) -> tensors {
              auto y = x[0] * buffer(m);
              {
                torch::NoGradGuard no_grad;
                buffer(m).mul_(0.9).add_(x[0].mean(0));
              }
              return {y.matmul(weight(m)).sin() * buffer(m), buffer(m) * 2};
            }),
      small("outputs that are inputs, parameters, each other, scalars",
            [](auto& m, auto& x) -> tensors {
              auto y = x[0].matmul(weight(m)).sin();
              return {x[0], x[1].view({6, 4}), y, y.t(), weight(m), y.sum()};
            },
            {torch::randn({4, 6}).requires_grad_(), torch::randn({4, 6})}),
      small("complex numbers",
            [](auto& m, auto& x) -> tensors {
              auto f = at::fft_rfft(x[0].matmul(weight(m)));
              return {at::real(f * f.conj()) + at::imag(f.exp())};
            }),
      small("equal gradients that are rounded twice and added",
            [](auto& m, auto& x) -> tensors {
              auto y = x[0].matmul(weight(m)).to(torch::kBFloat16);
              return {y + (y + x[0])};
            }),
      small("gradients shared and expanded", [](auto& m, auto& x) -> tensors { return {(x[0] + x[1]).sum() + weight(m).sum()}; },
            {torch::randn({4, 6}).requires_grad_(), torch::randn({4, 6}).requires_grad_()}),
      small("inputs with gaps", [](auto& m, auto& x) -> tensors { return {x[0].relu().matmul(weight(m)).sin()}; },
            {torch::randn({9, 14}).slice(0, 1, 9, 2).slice(1, 2, 14, 2)}),
      {"batch norm used twice, then asked for its statistics",
       bn,
       [bn](const tensors& x) -> tensors {
         auto y = bn->forward(bn->forward(x[0]).sin());
         return {at::batch_norm(y, bn->weight, bn->bias, bn->running_mean, bn->running_var, false, 0.1, 1e-5, false)};
       },
       {torch::randn({5, 6})}},
  };
  for (const auto& s : samples) DYNAMIC_SECTION(s.name) {
      check_against_eager(s);
    }
}

TEST_CASE("folded turns values made on another device from constants alone into constants") {
  torch::manual_seed(21);
  const auto s = small("positions", [](auto& m, auto& x) -> tensors {
    const auto places = torch::arange(6).mul(2);
    const auto mask = torch::ones({4, 6}).tril(1).to(at::kBool);
    return {x[0].matmul(weight(m)).masked_fill(mask.logical_not(), 0.5) + places.flip(0), places.clone()};
  });
  const auto p = capture_sample(s);
  captured other = p;  // as if `on` were another device than that of the step
  auto step = std::make_shared<const program>(remat::pytorch::folded(*p.step, c10::kMeta));
  remat::pytorch::verify(*step);
  other.step = step;
  auto announced = s.module->parameters();
  for (const auto& t : s.module->buffers()) announced.push_back(t);
  other.tensors = remat::pytorch::bindings(step, announced);
  const auto of = [](const program& x, const std::string& name) {
    return std::count_if(x.nodes.begin(), x.nodes.end(), [&](const auto& n) { return n.name.find(name) != n.name.npos; });
  };
  for (const auto* name : {"aten::arange", "aten::tril", "aten::logical_not", "aten::flip"}) {
    CHECK(of(*p.step, name) == 1);
    CHECK(of(*step, name) == 0);
  }
  CHECK(of(*step, "aten::clone") == 1);  // the caller gets this value
  CHECK(of(*step, "aten::mm") == of(*p.step, "aten::mm"));
  for (auto mode : {interpreter::recompute::nothing, interpreter::recompute::each_node_twice})
    check_equal(interpreted(other, s, s.inputs, 3, mode), eager(s, s.inputs, 3));
  CHECK(remat::pytorch::folded(*p.step, c10::kCPU).nodes.size() == p.step->nodes.size());
}

TEST_CASE("a known result of an operator is not used under other global settings") {
  const auto s = small("put", [](auto& m, auto& x) -> tensors {
    return {x[0].matmul(weight(m)).put(torch::tensor({3, 1}), torch::tensor({1.0F, 2.0F}))};
  });
  capture_sample(s);
  at::globalContext().setDeterministicAlgorithms(true, false);
  CHECK_THROWS_WITH(capture_sample(s), Catch::Contains("deterministic"));
  at::globalContext().setDeterministicAlgorithms(false, false);
  CHECK_NOTHROW(capture_sample(s));
}

TEST_CASE("known results of operators", "[device]") {
  const on_test_device there;
  torch::manual_seed(4);
  SECTION("equal calls on other operands, in place and with draws") {
    check_against_eager(small("layers", [](auto& m, auto& x) -> tensors {
      auto y = x[0];
      for (int i = 0; i < 4; ++i) {
        auto z = torch::dropout(y.matmul(weight(m)).relu_(), 0.5, true);
        y = z.add_(i % 2 ? y : y.sin()).mul_(2);
      }
      return {y, y.to(torch::kDouble).select(1, 2), std::get<0>(torch::native_dropout(y, 0.5, true))};
    }));
  }
  SECTION("an operand that is used twice differs from two operands") {
    check_against_eager(small("twice", [](auto& m, auto& x) -> tensors {
      const auto y = x[0].matmul(weight(m)), z = y.sin();
      auto a = y * 2, b = y * 3;
      return {a.add_(z), b.add_(b)};
    }));
  }
  SECTION("a refused call stays refused, and a value asked for by item() stays unknown") {
    const auto s = small("after known calls", [](auto& m, auto& x) -> tensors {
      auto y = x[0].matmul(weight(m)).sin();
      return {x.size() > 1 ? y.matmul(x[1]) : y.sum().template item<float>() > 0 ? y : y.cos()};
    });
    for (int i = 0; i < 2; ++i) CHECK_THAT(refusal(s), Catch::Contains("aten::_local_scalar_dense"));
    auto wrong = s;
    wrong.inputs.push_back(torch::rand({5, 2}));
    for (int i = 0; i < 2; ++i) CHECK_THROWS_WITH(capture_sample(wrong), Catch::Contains("cannot be multiplied"));
  }
  SECTION("products of matrices have the layout of their kernels") {
    const std::vector<std::pair<std::string, std::function<Tensor(Tensor, Tensor)>>> products = {
        {"mm", [](auto x, auto w) { return x.mm(w); }},
        {"mm of a transpose", [](auto x, auto w) { return w.t().mm(x.t()); }},
        {"mm of slices", [](auto x, auto w) { return x.slice(1, 0, 6, 2).mm(w.slice(0, 1, 6, 2)); }},
        {"mm with nothing", [](auto x, auto w) { return x.slice(0, 0, 0).mm(w); }},
        {"addmm", [](auto x, auto w) { return at::addmm(x.sum(0), x, w.t(), 0.5, 2); }},
        {"bmm",
         [](auto x, auto w) {
           return x.view({2, 2, 6}).bmm(w.expand({2, 6, 6}).transpose(1, 2)).transpose(0, 1);
         }},
        {"baddbmm", [](auto x, auto w) {
           return at::baddbmm(x.sum(), x.view({2, 2, 6}), w.expand({2, 6, 6}));
         }}};
    for (const auto& [name, f] : products)
      for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
        INFO(name << " of " << type);
        const auto s = small(name, [f = f, type](auto& m, auto& x) -> tensors { return {f(x[0].to(type), weight(m).to(type))}; });
        const auto c = capture_known(s);
        const auto real = s.forward(s.inputs)[0];
        const auto& recorded = c.step->views[c.step->outputs[0]];
        CHECK(at::IntArrayRef(recorded.sizes) == real.sizes());
        CHECK(at::IntArrayRef(recorded.strides) == real.strides());
        CHECK(recorded.dtype == real.scalar_type());
        CHECK(c.step->values[recorded.value].bytes == static_cast<remat::bytes_t>(real.storage().nbytes()));
      }
  }
  SECTION("convolutions keep the memory format of their kernels") {
    auto conv = std::make_shared<torch::nn::Conv2dImpl>(torch::nn::Conv2dOptions(3, 4, 3));
    conv->to(torch::kFloat);
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      const auto c = check_against_eager(
          {"conv",
           conv,
           [conv](const tensors& x) -> tensors { return {conv->forward(conv->forward(x[0]).sin().slice(1, 0, 3))}; },
           {torch::rand({2, 3, 9, 9}).contiguous(format)}});
      const auto& strides = c.step->views[c.step->outputs[0]].strides;
      CHECK((strides[1] == 1) == (format == at::MemoryFormat::ChannelsLast));
    }
  }
}
