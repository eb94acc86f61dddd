// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <sstream>
#include <thread>

#include <remat/core/evaluate.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/io.hpp>
#include <remat/pytorch/profile.hpp>

#include "../src/program/fold.hpp"
#include "compare.hpp"
#include "interpret.hpp"
#include "models.hpp"

#undef CHECK  // of PyTorch's logging: it aborts, and hides the one of Catch2
#include <catch2/catch.hpp>

using at::Tensor;
using remat::none;
using remat::pytorch::cannot_capture;
using remat::pytorch::capture;
using remat::pytorch::captured;
using remat::pytorch::interpreter;
using remat::pytorch::program;
using tensors = std::vector<Tensor>;

namespace {

/// Everything a step may change besides its results.
struct world {
  tensors parameters, buffers, grads;
  Tensor generator;
  explicit world(const torch::nn::Module& m)
      : parameters(copies_of(m.parameters())),
        buffers(copies_of(m.buffers())),
        generator(at::detail::getDefaultCPUGenerator().get_state()) {
    for (const auto& p : m.parameters()) grads.push_back(p.grad().defined() ? p.grad().clone() : Tensor());
  }
  bool operator==(const world& o) const {
    return same_bits(parameters, o.parameters) && same_bits(buffers, o.buffers) && same_bits(grads, o.grads) &&
           same_bits(generator, o.generator);
  }
};

void restore_buffers(const torch::nn::Module& m, const tensors& saved) {
  torch::NoGradGuard no_grad;
  const auto buffers = m.buffers();
  for (std::size_t i = 0; i < saved.size(); ++i) buffers[i].copy_(saved[i]);
}

/// Gradients of the outputs, deterministic, neither uniform nor contiguous in value.
tensors output_grads(const tensors& outputs) {
  tensors grads;
  for (const auto& o : outputs)
    grads.push_back(o.is_floating_point() ? at::linspace(0.5, 1.5, o.numel(), o.options().requires_grad(false)).view(o.sizes())
                                          : Tensor());
  return grads;
}

struct step_result {
  tensors outputs, parameter_grads, input_grads, buffers, inputs;
  Tensor generator;
};

void clear_grads(const torch::nn::Module& m) {
  for (auto& p : m.parameters()) p.mutable_grad() = Tensor();
}

/// The step as PyTorch does it, with `.backward()`.
step_result eager(const models::sample& s, const tensors& inputs, uint64_t seed) {
  torch::manual_seed(seed);
  clear_grads(*s.module);
  tensors fresh;
  for (const auto& x : inputs) fresh.push_back(x.detach().clone().requires_grad_(x.requires_grad()));
  auto outputs = s.forward(fresh);
  const auto grads = output_grads(outputs);
  tensors roots, root_grads;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i].requires_grad()) {
      roots.push_back(outputs[i]);
      root_grads.push_back(grads[i]);
    }
  step_result r;
  r.outputs = copies_of(outputs);
  torch::autograd::backward(roots, root_grads);
  for (const auto& p : s.module->parameters())
    if (p.requires_grad() && p.grad().defined()) r.parameter_grads.push_back(p.grad().clone());
  for (const auto& x : fresh) r.input_grads.push_back(x.requires_grad() ? x.grad() : Tensor());
  r.buffers = copies_of(s.module->buffers());
  r.inputs = copies_of(fresh);
  r.generator = at::detail::getDefaultCPUGenerator().get_state();
  clear_grads(*s.module);
  return r;
}

step_result interpreted(const captured& p, const models::sample& s, const tensors& inputs, uint64_t seed,
                        interpreter::recompute mode, std::size_t* recomputed = nullptr) {
  torch::manual_seed(seed);
  auto fresh = copies_of(inputs);
  auto r = interpreter(*p.step, p.tensors).run(fresh, output_grads, mode, static_cast<unsigned>(seed));
  if (recomputed) *recomputed = r.recomputed;
  return {r.outputs,     r.parameter_grads,
          r.input_grads, copies_of(s.module->buffers()),
          fresh,         at::detail::getDefaultCPUGenerator().get_state()};
}

void check_equal(const step_result& a, const step_result& b) {
  CHECK(same_bits(a.outputs, b.outputs));
  CHECK(same_bits(a.parameter_grads, b.parameter_grads));
  CHECK(same_bits(a.input_grads, b.input_grads));
  CHECK(same_bits(a.buffers, b.buffers));
  CHECK(same_bits(a.inputs, b.inputs));
  CHECK(same_bits(a.generator, b.generator));
}

captured capture_sample(const models::sample& s) {
  return capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers());
}

/// Random values of the same kind; integers are permuted so that indices stay valid.
tensors other_batch(const tensors& inputs) {
  tensors result;
  for (const auto& x : inputs)
    result.push_back(
        (x.is_floating_point() ? torch::randn_like(x.detach()) : x.flip(0).contiguous()).requires_grad_(x.requires_grad()));
  return result;
}

std::string text_of(const captured& c) {
  std::ostringstream out;
  remat::pytorch::write_program(out, *c.step);
  return out.str();
}

/// Captures twice: operators run, or their results are known.
captured capture_known(const models::sample& s) {
  remat::pytorch::forget_profiles();
  const auto first = text_of(capture_sample(s));
  auto again = capture_sample(s);
  CHECK(text_of(again) == first);
  return again;
}

/// Captures, and compares with eager PyTorch while recomputing nothing, each node at once, and any node at any time.
captured check_against_eager(const models::sample& s) {
  const world before(*s.module);
  auto p = capture_known(s);
  REQUIRE(world(*s.module) == before);
  INFO(remat::pytorch::explain(*p.step));
  const auto batch = other_batch(s.inputs);
  const auto expected = eager(s, batch, 7);
  restore_buffers(*s.module, before.buffers);
  using mode = interpreter::recompute;
  for (auto m : {mode::nothing, mode::each_node_twice, mode::random_nodes}) {
    std::size_t recomputed = 0;
    const auto got = interpreted(p, s, batch, 7, m, &recomputed);
    restore_buffers(*s.module, before.buffers);
    check_equal(got, expected);
    CHECK((m == mode::nothing) == (recomputed == 0));
  }
  return p;
}

using function = std::function<tensors(torch::nn::Module&, const tensors&)>;

/// One weight of 6 x 6, one buffer of 6, and a forward.
models::sample small(const std::string& name, const function& f, tensors inputs = {torch::randn({4, 6})}) {
  auto m = std::make_shared<torch::nn::Module>();
  m->register_parameter("weight", torch::randn({6, 6}));
  m->register_buffer("buffer", torch::rand(6));
  return {name, m, [m, f](const tensors& in) { return f(*m, in); }, std::move(inputs)};
}
Tensor weight(const torch::nn::Module& m) { return m.named_parameters()["weight"]; }
Tensor buffer(const torch::nn::Module& m) { return m.named_buffers()["buffer"]; }

std::string refusal(const models::sample& s) {
  const world before(*s.module);
  std::string why;
  try {
    capture_sample(s);
  } catch (const cannot_capture& e) {
    why = e.what();
  }
  CHECK(world(*s.module) == before);
  return why;
}

}  // namespace

TEST_CASE("every node of a captured program can be trusted alone") {
  at::set_num_threads(1);
  torch::manual_seed(1);
  for (const auto& s : models::all()) {
    DYNAMIC_SECTION(s.name) {
      const world before(*s.module);
      const auto p = check_against_eager(s);
      // Negative control: the batch and the draws matter.
      const auto one = interpreted(p, s, s.inputs, 7, interpreter::recompute::nothing);
      restore_buffers(*s.module, before.buffers);
      const auto other = interpreted(p, s, s.inputs, 8, interpreter::recompute::nothing);
      restore_buffers(*s.module, before.buffers);
      const bool random = std::any_of(p.step->nodes.begin(), p.step->nodes.end(), [](const auto& n) { return n.random; });
      CHECK(same_bits(one.parameter_grads, other.parameter_grads) != random);
    }
  }
}

TEST_CASE("what modules do besides calling layers") {
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

TEST_CASE("what is made of constants alone on another device is a constant") {
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
  CHECK(of(*step, "aten::clone") == 1);  // the caller gets it
  CHECK(of(*step, "aten::mm") == of(*p.step, "aten::mm"));
  for (auto mode : {interpreter::recompute::nothing, interpreter::recompute::each_node_twice})
    check_equal(interpreted(other, s, s.inputs, 3, mode), eager(s, s.inputs, 3));
  CHECK(remat::pytorch::folded(*p.step, c10::kCPU).nodes.size() == p.step->nodes.size());
}

TEST_CASE("operators whose results are known") {
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
  SECTION("one operand twice is not two operands") {
    check_against_eager(small("twice", [](auto& m, auto& x) -> tensors {
      const auto y = x[0].matmul(weight(m)), z = y.sin();
      auto a = y * 2, b = y * 3;
      return {a.add_(z), b.add_(b)};
    }));
  }
  SECTION("settings count") {
    const auto s = small("put", [](auto& m, auto& x) -> tensors {
      return {x[0].matmul(weight(m)).put(torch::tensor({3, 1}), torch::tensor({1.0F, 2.0F}))};
    });
    capture_sample(s);
    at::globalContext().setDeterministicAlgorithms(true, false);
    CHECK_THROWS_WITH(capture_sample(s), Catch::Contains("deterministic"));
    at::globalContext().setDeterministicAlgorithms(false, false);
    CHECK_NOTHROW(capture_sample(s));
  }
  SECTION("what a kernel refuses stays refused, what would be a number stays unknown") {
    const auto s = small("after known calls", [](auto& m, auto& x) -> tensors {
      auto y = x[0].matmul(weight(m)).sin();
      return {x.size() > 1 ? y.matmul(x[1]) : y.sum().template item<float>() > 0 ? y : y.cos()};
    });
    for (int i = 0; i < 2; ++i) CHECK_THAT(refusal(s), Catch::Contains("aten::_local_scalar_dense"));
    auto wrong = s;
    wrong.inputs.push_back(torch::rand({5, 2}));
    for (int i = 0; i < 2; ++i) CHECK_THROWS_WITH(capture_sample(wrong), Catch::Contains("cannot be multiplied"));
  }
  SECTION("products of matrices lie where their kernels put them") {
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
        const auto& told = c.step->views[c.step->outputs[0]];
        CHECK(at::IntArrayRef(told.sizes) == real.sizes());
        CHECK(at::IntArrayRef(told.strides) == real.strides());
        CHECK(told.dtype == real.scalar_type());
        CHECK(c.step->values[told.value].bytes == static_cast<remat::bytes_t>(real.storage().nbytes()));
      }
  }
  SECTION("layouts that kernels choose") {
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

TEST_CASE("what cannot be captured is refused by name, and leaves no trace") {
  torch::manual_seed(3);
  using Catch::Contains;
  CHECK_THAT(refusal(small("item",
                           [](auto& m, auto& x) -> tensors {
                             buffer(m).add_(1);
                             auto y = torch::dropout(x[0].matmul(weight(m)), 0.5, true);
                             return {y.sum().template item<float>() > 0 ? y : y * 2};
                           })),
             Contains("aten::_local_scalar_dense") && Contains("forward, after aten::sum") && Contains("fixed graph"));
  CHECK_THAT(refusal(small("mask",
                           [](auto& m, auto& x) -> tensors {
                             auto y = x[0].matmul(weight(m));
                             return {y.index({y > 0})};
                           })),
             Contains("aten::index") && Contains("fixed graph"));
  CHECK_THAT(refusal(small("no gradient", [](auto&, auto& x) -> tensors { return {x[0].sin()}; })),
             Contains("outputs of the module need no gradient"));
  CHECK_THAT(refusal(small("sparse", [](auto& m, auto& x) -> tensors { return {weight(m).to_sparse().sum() + x[0].sum()}; })),
             Contains("aten::"));
  CHECK_THAT(
      refusal(small("zeros without memory", [](auto& m, auto& x) -> tensors { return {weight(m).sgn().sum() + x[0].sum()}; })),
      Contains("aten::_efficientzerotensor") && Contains("plain storage"));
  CHECK_THAT(refusal(small("resize",
                           [](auto& m, auto& x) -> tensors {
                             auto y = x[0].sin();
                             y.resize_({40, 40});
                             return {y.sum() * weight(m)};
                           })),
             Contains("aten::resize_"));
  CHECK_THAT(refusal(small("generator",
                           [](auto& m, auto& x) -> tensors {
                             return {x[0].matmul(weight(m)) * torch::rand({6}, at::detail::createCPUGenerator(5))};
                           })),
             Contains("generator"));
  const auto hidden = torch::randn({6, 6}).requires_grad_();
  CHECK_THAT(refusal(small("hidden parameter", [hidden](auto&, auto& x) -> tensors { return {x[0].matmul(hidden)}; })),
             Contains("not among the parameters"));
  CHECK_THAT(refusal(small("thread",
                           [](auto& m, auto& x) -> tensors {
                             Tensor y;
                             std::thread([&] { y = torch::ones({3}) * 2; }).join();
                             return {x[0].matmul(weight(m)), y};
                           })),
             Contains("output 1"));

  SECTION("errors of the module come through") {
    const auto s = small("shapes", [](auto& m, auto& x) -> tensors { return {torch::rand({3, 3}).matmul(weight(m)) + x[0]}; });
    const world before(*s.module);
    CHECK_THROWS_AS(capture_sample(s), c10::Error);
    CHECK(world(*s.module) == before);
  }
  SECTION("existing gradients are left alone") {
    const auto s = models::mlp();
    for (auto& p : s.module->parameters()) p.mutable_grad() = torch::ones_like(p);
    const world before(*s.module);
    capture_sample(s);
    CHECK(world(*s.module) == before);
  }
}

TEST_CASE("a parameter that is not used gets no gradient") {
  auto s = small("unused", [](auto& m, auto& x) -> tensors { return {x[0].matmul(weight(m))}; });
  s.module->register_parameter("idle", torch::randn({100}));
  const auto p = check_against_eager(s);
  REQUIRE(p.step->parameters.size() == 1);
  CHECK(p.tensors[p.step->parameters[0]].is_same(weight(*s.module)));
}

TEST_CASE("capture needs the memory of one operator") {
  struct meter : c10::MemoryReportingInfoBase {
    int64_t now = 0, peak = 0;
    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override { peak = std::max(peak, now += size); }
    bool memoryProfilingEnabled() const override { return true; }
  };
  const auto s = models::mlp(4096, 64, 12);  // 1 MiB per activation
  auto measure = [](const auto& f) {
    auto m = std::make_shared<meter>();
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, m);
    f();
    return m->peak;
  };
  const auto captured = measure([&] { capture_sample(s); });
  const auto real = measure([&] { eager(s, s.inputs, 1); });
  CHECK(real > 20 << 20);
  CHECK(captured < 5 << 20);
}

TEST_CASE("programs as planning problems") {
  for (const auto& s : models::all()) {
    DYNAMIC_SECTION(s.name) {
      const auto p = *capture_sample(s).step;
      const auto n = p.nodes.size();
      const auto q = remat::pytorch::to_problem(p, std::vector<double>(n, 1), std::vector<remat::bytes_t>(n, 0), s.name);
      REQUIRE(q.values().size() >= p.values.size());
      for (remat::index_t v = 0; v < q.values().size(); ++v)  // those that order what has effects take nothing
        if (v >= p.values.size()) CHECK((q.values()[v].bytes == 0 && q.is_target(v) && q.consumers(v).size() == 1));
      REQUIRE(q.operations().size() == n);
      CHECK(remat::evaluate(q, remat::store_all_schedule(q)).seconds == static_cast<double>(n));
      CHECK(q.backward_start() == std::optional<remat::operation_id>(p.loss + 1));
      for (const auto& v : q.values()) CHECK(v.bytes % 64 == 0);
      for (auto g : p.parameter_grads) CHECK(q.is_target(p.views[g].value));
      for (auto g : p.output_grads)
        if (g != none) CHECK(q.producer(p.views[g].value) == p.loss);
      remat::bytes_t held = 0;
      for (const auto& t : s.module->parameters()) held += (static_cast<remat::bytes_t>(t.nbytes()) + 63) / 64 * 64;
      CHECK(q.held_bytes() >= held);
      CHECK_THROWS_AS(remat::pytorch::to_problem(p, {}, {}), remat::bad_option);
    }
  }
}

TEST_CASE("gradients are laid out like the parameters") {
  for (const auto& s : models::all()) {
    DYNAMIC_SECTION(s.name) {
      const auto p = *capture_sample(s).step;
      REQUIRE(p.parameters.size() == p.parameter_grads.size());
      for (std::size_t i = 0; i < p.parameters.size(); ++i) {
        const auto& v = p.views[p.parameter_grads[i]];
        CHECK(p.slots[p.parameters[i]].type.sizes == v.sizes);
        CHECK(p.slots[p.parameters[i]].type.strides == v.strides);
      }
    }
  }
}

TEST_CASE("draws of other threads during a capture are neither frozen nor lost") {
  auto generator = at::detail::getDefaultCPUGenerator();
  int foreign = 0;
  const auto s = small("another thread", [&](auto& m, auto& x) -> tensors {
    auto y = torch::dropout(x[0].matmul(weight(m)), 0.5, true);
    std::thread([&] { torch::rand({1000}), ++foreign; }).join();
    return {torch::dropout(y.sin(), 0.5, true)};
  });
  torch::manual_seed(1);
  torch::rand({1000});
  const auto drawn = generator.get_state();
  torch::manual_seed(1);
  const auto p = capture_sample(s);
  CHECK(foreign == 1);
  CHECK(same_bits(generator.get_state(), drawn));
  for (const auto& n : p.step->nodes) CHECK(n.starts.from == remat::pytorch::generator_origin::next);
}
