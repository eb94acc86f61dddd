// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <random>
#include <remat/core/evaluate.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/io.hpp>
#include <sstream>

#include "compare.hpp"
#include "interpret.hpp"
#include "models.hpp"

using namespace remat;
using namespace remat::pytorch;

namespace {

captured captured_from(const models::sample& s) {
  return capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers());
}
std::vector<at::Tensor> tensors_of(const ::torch::nn::Module& m) {
  auto list = m.parameters();
  for (const auto& b : m.buffers()) list.push_back(b);
  return list;
}
std::string document_of(const program& p, const program_parts& parts = {}) {
  std::ostringstream out;
  write_program(out, p, parts);
  return out.str();
}
program program_in(const std::string& text) {
  std::istringstream in(text);
  return read_program(in);
}

/// All state of the step after a run by the interpreter.
std::vector<at::Tensor> interpreted_from(const captured& c, const models::sample& s, const std::vector<at::Tensor>& buffers) {
  at::NoGradGuard no_grad;
  auto now = s.module->buffers();
  for (std::size_t i = 0; i < now.size(); ++i) now[i].copy_(buffers[i]);
  ::torch::manual_seed(3);
  const auto r = interpreter(*c.step, c.tensors)
                     .run(
                         copies_of(s.inputs),
                         [](const auto& outputs) {
                           std::vector<at::Tensor> grads;
                           for (const auto& o : outputs) grads.push_back(at::ones_like(o));
                           return grads;
                         },
                         interpreter::recompute::random_nodes, 5);
  auto all = copies_of(r.outputs);
  for (const auto* list : {&r.parameter_grads, &r.input_grads})
    for (const auto& t : copies_of(*list)) all.push_back(t);
  for (const auto& b : copies_of(s.module->buffers())) all.push_back(b);
  all.push_back(at::detail::getDefaultCPUGenerator().get_state());
  return all;
}

/// A step with all features: constants, numbers, infinities, lists, generator states, found tensors, complex numbers.
models::sample everything() {
  auto m = std::make_shared<::torch::nn::Module>();
  const auto weight = m->register_parameter("weight", ::torch::randn({6, 6}));
  const auto state = m->register_buffer("state", ::torch::rand(6));
  const auto hidden = ::torch::rand(6);
  return {"everything",
          m,
          [=](const auto& in) -> std::vector<at::Tensor> {
            auto y = ::torch::dropout(in[0].matmul(weight), 0.5, true) * hidden;
            y = y.masked_fill(::torch::ones({4, 6}, ::torch::kBool).tril(), -std::numeric_limits<float>::infinity()).exp() + y;
            float raw[6] = {6, 5, 4, 3, 2, 1};
            auto filled = ::torch::empty({6});
            for (int i = 0; i < 6; ++i) filled.data_ptr<float>()[i] = static_cast<float>(i);
            y = y * ::torch::from_blob(raw, {6}) + filled + ::torch::tensor(0.5F) * 2;
            ::torch::manual_seed(9);
            y = ::torch::dropout(y, 0.25, true);
            {
              at::NoGradGuard no_grad;
              auto s = state;
              s.mul_(0.5).add_(y.mean(0));
            }
            const auto index = ::torch::tensor({2, 0, 0});
            y = ::torch::cat({y.index({index}), ::torch::stack({y[0], y[1]})}, 0);
            y.slice(0, 1, 3).mul_(2);
            const auto f = at::fft_rfft(y);
            return {at::real(f * f.conj()).sum() + y.std(), y};
          },
          {::torch::randn({4, 6})}};
}

std::vector<models::sample> document_samples() {
  auto list = models::all();
  list.push_back(everything());
  return list;
}

}  // namespace

TEST_CASE("programs survive a round trip through a document") {
  ::torch::manual_seed(1);
  for (const auto& s : document_samples()) {
    DYNAMIC_SECTION(s.name) {
      const auto c = captured_from(s);
      const auto text = document_of(*c.step);
      const auto again = std::make_shared<const program>(program_in(text));
      CHECK(document_of(*again) == text);
      const auto buffers = copies_of(s.module->buffers());
      std::vector<at::Tensor> found;
      for (index_t k = 0; k < c.step->slots.size(); ++k)
        if (c.step->slots[k].from == role::found) found.push_back(c.tensors[k]);
      const captured other{again, bindings(again, tensors_of(*s.module), found), c.reached};
      CHECK(same_bits(interpreted_from(c, s, buffers), interpreted_from(other, s, buffers)));
      CHECK_FALSE(document_of(*c.step, {.names = false}).find("\"name\"") < text.size());
      // Programs of one kind of module have the same document, whatever the modules are called.
      CHECK(document_of(*captured_from(s).step, {.contents = false}) == document_of(*c.step, {.contents = false}));
    }
  }
}

TEST_CASE("plans survive a round trip through a document") {
  ::torch::manual_seed(1);
  const auto s = models::conv();
  const auto c = captured_from(s);
  planned_program d{c.step, profile(*c.step, {.cache = {}, .seconds = 0}), {}};
  const auto p = to_problem(*c.step, d.profiles.seconds(), d.profiles.workspace());
  d.result.schedule = store_all_schedule(p);
  std::stringstream text;
  write_planned_program(text, d);
  const auto read = read_planned_program(text);
  CHECK(read.result.schedule == d.result.schedule);
  CHECK(read.profiles.seconds() == d.profiles.seconds());
  const auto first = std::make_shared<execution_plan>(d.step, d.result.schedule, d.profiles);
  const auto second = std::make_shared<execution_plan>(read.step, read.result.schedule, read.profiles);
  CHECK(first->needed_bytes() == second->needed_bytes());
  const auto buffers = copies_of(s.module->buffers());
  const auto run = [&](const std::shared_ptr<execution_plan>& plan, const std::shared_ptr<const program>& step) {
    at::NoGradGuard no_grad;
    auto now = s.module->buffers();
    for (std::size_t i = 0; i < now.size(); ++i) now[i].copy_(buffers[i]);
    ::torch::manual_seed(2);
    executor e(plan, bindings(step, tensors_of(*s.module)));
    auto all = copies_of(e.forward(s.inputs));
    for (const auto& g : e.backward({at::ones_like(all[0])}).parameters) all.push_back(g.clone());
    for (const auto& b : copies_of(s.module->buffers())) all.push_back(b);
    return all;
  };
  CHECK(same_bits(run(first, d.step), run(second, read.step)));
}

TEST_CASE("the error for a broken program names the node and the field") {
  ::torch::manual_seed(1);
  const auto whole = *captured_from(everything()).step;
  const auto refused = [&](const auto& damage, const std::string& why) {
    auto p = whole;
    damage(p);
    CHECK_THROWS_WITH(verify(p), Catch::Contains(why));
    CHECK_THROWS_AS(verify(p), bad_program);
  };
  CHECK_NOTHROW(verify(whole));
  const auto node_with = [&](const auto& is) {
    for (index_t i = 0; i < whole.nodes.size(); ++i)
      if (is(whole.nodes[i])) return i;
    return none;
  };
  const auto calling = node_with([](const auto& n) { return !n.calls.empty() && !n.calls[0].operands.empty(); });
  const auto writing = node_with([](const auto& n) { return !n.overwrites.empty(); });
  const auto late = node_with([&](const auto& n) { return !n.inputs.empty() && !whole.is_given(n.inputs[0]); });
  REQUIRE((calling != none && writing != none && late != none));
  const auto named = "node " + std::to_string(calling);
  refused([&](auto& p) { p.views[0].value = 9999; }, "views[0].value");
  refused([&](auto& p) { p.views[0].offset = -4; }, "views[0].offset");
  refused([&](auto& p) { p.views[0].sizes.assign(3, int64_t{1} << 30), p.views[0].strides.assign(3, 1); }, "views[0].");
  refused([&](auto& p) { p.slots[0].value = 1; }, "values[0].slot");
  refused([&](auto& p) { p.values[0].bytes = -1; }, "values[0].bytes");
  refused([&](auto& p) { p.loss = none; }, "loss");
  refused([&](auto& p) { p.nodes[calling].calls[0].operands[0].view = 99999; }, named + ": calls[0].operands[0].view");
  refused([&](auto& p) { p.nodes[calling].calls[0].operands[0].at = 77; }, named + ": calls[0].operands[0].at");
  refused([&](auto& p) { p.nodes[calling].calls[0].arguments.pop_back(); }, named + ": calls[0].arguments");
  refused([&](auto& p) { p.nodes[calling].calls[0].arguments[0] = "text"; }, named + ": calls[0]");
  refused([&](auto& p) { p.nodes[calling].inputs.clear(); }, named + ": calls[0].operands[0].view");
  refused([&](auto& p) { p.nodes[calling].outputs.clear(); }, named + ": calls[0].results[0].view");
  refused([&](auto& p) { p.nodes[writing].overwrites[0].first = p.nodes[writing].overwrites[0].second; }, "overwrites[0]");
  refused([&](auto& p) { std::swap(p.nodes[late], p.nodes[0]); }, "node 0: inputs[0]: is read before it is made");
  refused([&](auto& p) { p.nodes.push_back(p.nodes[calling]); }, "is written already");
  refused([&](auto& p) { p.parameters[0] = p.slots.size(); }, "parameters[0]");
  refused([&](auto& p) { p.tokens.push_back(0); }, "tokens[");
  refused([&](auto& p) { p.results.push_back(7); }, "results[");
  refused([&](auto& p) { p.constants.pop_back(); }, "is no constant");
}

TEST_CASE("damaged documents are read or refused with a typed error") {
  ::torch::manual_seed(1);
  const auto s = everything();
  const auto c = captured_from(s);
  planned_program d{c.step, profile(*c.step, {.cache = {}, .seconds = 0}), {}};
  d.result.schedule = store_all_schedule(to_problem(*c.step, d.profiles.seconds(), d.profiles.workspace()));
  std::ostringstream out;
  write_planned_program(out, d);
  const auto text = out.str();
  const auto tree = nlohmann::ordered_json::parse(text);
  const auto flat = tree.flatten();
  std::vector<std::string> places;
  for (const auto& [place, x] : flat.items()) places.push_back(place);
  std::mt19937 random(4);
  const auto any = [&](std::size_t n) { return random() % n; };
  std::size_t refused = 0, taken = 0;
  const auto offer = [&](const std::string& damaged) {
    std::istringstream in(damaged);
    try {
      const auto plan = read_planned_program(in);
      execution_plan(plan.step, plan.result.schedule, plan.profiles);
      ++taken;
    } catch (const remat::error&) {
      ++refused;
    }
  };
  for (int i = 0; i < 50; ++i) {
    auto damaged = text;
    switch (any(4)) {
      case 0:
        damaged.resize(any(damaged.size()));
        break;
      case 1:
        damaged[any(damaged.size())] = static_cast<char>(random());
        break;
      case 2:
        damaged.erase(any(damaged.size()), 1 + any(40));
        break;
      default:
        damaged.insert(any(damaged.size()), std::string(1 + any(3), "[{\"0-,]}e"[any(9)]));
    }
    offer(damaged);
  }
  const std::vector<nlohmann::ordered_json> strangers = {nullptr,
                                                         -1,
                                                         0,
                                                         1,
                                                         7,
                                                         4294967295U,
                                                         std::int64_t{1} << 62,
                                                         18446744073709551615U,
                                                         1e300,
                                                         "",
                                                         "aten::set_",
                                                         true,
                                                         nlohmann::ordered_json::array(),
                                                         nlohmann::ordered_json::object()};
  for (int i = 0; i < 200; ++i) {
    auto damaged = tree;
    const nlohmann::ordered_json::json_pointer place(places[any(places.size())]);
    if (any(5) == 0 && damaged.at(place.parent_pointer()).is_object())
      damaged.at(place.parent_pointer()).erase(place.back());
    else if (any(5) == 0)
      damaged.at(place) = flat.at(places[any(places.size())]);
    else
      damaged.at(place) = strangers[any(strangers.size())];
    offer(damaged.dump());
  }
  CHECK(refused > 130);  // names, costs and some other fields may have any value
  CHECK(taken > 0);
  CHECK_THROWS_AS(program_in("{\"format\": \"remat-problem\", \"version\": 1}"), bad_document);
}
