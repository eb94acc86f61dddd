// SPDX-License-Identifier: Apache-2.0
/// @file
/// Trains a GPT-2-like model on a book inside half of its activation memory, next to the plain model from the same seed, and
/// compares losses, gradients, memory and time at every step.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <remat/io/bytes.hpp>
#include <remat/io/file.hpp>
#include <remat/io/json.hpp>
#include <remat/io/timeline.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>

#include "gpt.hpp"

namespace {

/// The text as token numbers, one per character, with batches drawn from it.
struct corpus {
  explicit corpus(const std::string& file) {
    std::ifstream in(file);
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    if (text.empty()) throw std::runtime_error("cannot read " + file);
    std::map<char, int64_t> number;
    for (char c : text) number.emplace(c, 0);
    for (auto& [c, n] : number) n = vocabulary++;
    for (char c : text) tokens.push_back(number[c]);
  }

  /// {tokens, next tokens}, each (batch, length)
  std::pair<torch::Tensor, torch::Tensor> batch(int64_t batch, int64_t length, std::mt19937_64& random) const {
    auto x = torch::empty({batch, length}, torch::kLong), y = torch::empty_like(x);
    for (int64_t b = 0; b < batch; ++b) {
      const auto from =
          tokens.begin() + static_cast<std::ptrdiff_t>(random() % (tokens.size() - static_cast<std::size_t>(length) - 1));
      std::copy_n(from, length, x[b].data_ptr<int64_t>());
      std::copy_n(from + 1, length, y[b].data_ptr<int64_t>());
    }
    return {x, y};
  }

  std::vector<int64_t> tokens;
  int64_t vocabulary = 0;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0;
}

double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return same_bits(a, b) ? 0 : (a.detach() - b.detach()).abs().max().item<double>();
}

/// Time and memory of the training steps of one model.
struct measurement {
  std::vector<double> seconds;
  remat::bytes_t peak = 0;
  remat::memory_series memory;  ///< bytes over the last step

  /// @param step    runs forward and backward, returns the loss
  /// @param foreign live bytes that do not belong to the model
  /// @param record  true to fill `memory`, which takes a little time
  template <class Step>
  torch::Tensor run(const Step& step, remat::bytes_t foreign, bool record) {
    using clock = std::chrono::steady_clock;
    const auto begin = clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(clock::now() - begin).count(); };
    memory.points = {{0, remat::pytorch::meter::live() - foreign}};
    remat::pytorch::meter::reset_peak();
    if (record)
      remat::pytorch::meter::observe([&](remat::bytes_t live) { memory.points.emplace_back(elapsed(), live - foreign); });
    auto loss = step();
    seconds.push_back(elapsed());
    remat::pytorch::meter::observe({});
    peak = std::max(peak, remat::pytorch::meter::peak() - foreign);
    return loss;
  }
};

struct arguments {
  std::string text, folder, budget = "50%";
  int steps = 50;
  int64_t batch = 8;
  gpt_options model;
};

int run(const arguments& a) {
  remat::pytorch::meter::install();
  const corpus book(a.text);
  auto sizes = a.model;
  sizes.vocabulary = book.vocabulary;
  std::mt19937_64 batches(1);

  torch::manual_seed(1);
  Gpt plain(sizes);
  const auto plain_bytes = remat::pytorch::meter::live();  // parameters
  torch::manual_seed(1);
  Gpt model(sizes);

  // The one line that matters: the same model, inside a budget.
  const auto sample = book.batch(a.batch, sizes.context, batches);
  const auto wrapped = remat::pytorch::wrap(model, std::tuple(sample.first, sample.second), {.budget = a.budget});

  torch::optim::SGD plain_optimizer(plain->parameters(), 0.3), optimizer(wrapped->parameters(), 0.3);
  measurement eager, planned;
  double loss_difference = 0, gradient_difference = 0, first_loss = 0, last_loss = 0;
  bool bitwise = true;
  for (int step = 0; step < a.steps; ++step) {
    const auto [tokens, next] = book.batch(a.batch, sizes.context, batches);
    const auto inputs = static_cast<remat::bytes_t>(tokens.nbytes() + next.nbytes());
    const bool last = step + 1 == a.steps;
    plain->zero_grad();
    wrapped->zero_grad();
    torch::Tensor plain_loss, loss;
    const auto plain_step = [&, &x = tokens, &y = next] {
      torch::manual_seed(static_cast<uint64_t>(step));
      plain_loss = eager.run(
          [&] {
            auto l = plain->forward(x, y);
            l.backward();
            return l.detach();
          },
          remat::pytorch::meter::live() - plain_bytes - inputs, last);
    };
    const auto planned_step = [&, &x = tokens, &y = next] {
      torch::manual_seed(static_cast<uint64_t>(step));
      const auto others =
          plain_bytes + (plain_loss.defined() ? plain_bytes + static_cast<remat::bytes_t>(plain_loss.nbytes()) : 0);
      loss = planned.run(
          [&] {
            auto l = wrapped->forward(x, y);
            l.backward();
            return l.detach();
          },
          others + static_cast<remat::bytes_t>(sample.first.nbytes() + sample.second.nbytes()), last);
    };
    if (step % 2 == 0) {  // alternate, so that neither model always finds warm caches
      plain_step();
      planned_step();
    } else {
      planned_step();
      plain_step();
    }
    bitwise = bitwise && same_bits(plain_loss, loss);
    loss_difference = std::max(loss_difference, largest_difference(plain_loss, loss));
    const auto plain_parameters = plain->parameters(), parameters = wrapped->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      bitwise = bitwise && same_bits(plain_parameters[i].grad(), parameters[i].grad());
      gradient_difference = std::max(gradient_difference, largest_difference(plain_parameters[i].grad(), parameters[i].grad()));
    }
    plain_optimizer.step();
    optimizer.step();
    last_loss = loss.item<double>();
    if (step == 0) first_loss = last_loss;
    if (step % 10 == 0 || last) std::printf("step %3d  loss %.4f\n", step, last_loss);
  }

  const auto plan = wrapped->session().planned();
  const auto& r = plan.report;
  const auto eager_seconds = median(eager.seconds), seconds = median(planned.seconds);
  const auto store_all_peak = r.held() + r.store_all;
  const auto operations = plan.problem.operations().size();
  const auto row = [](const char* name, const std::string& text) { std::printf("%-22s %s\n", name, text.c_str()); };
  const auto size = [](remat::bytes_t b) { return remat::format_bytes(b) + " (" + std::to_string(b) + " bytes)"; };
  const auto number = [](const char* format, auto... x) {
    char text[160];
    std::snprintf(text, sizeof text, format, x...);
    return std::string(text);
  };
  std::printf("\n");
  row("store-all peak", size(store_all_peak));
  row("budget", size(r.budget) + " = " + remat::format_bytes(r.held()) + " held + " + remat::format_bytes(r.left) +
                    " for activations, gradients");
  row("planned peak",
      size(r.total()) +
          number(", arena %.2f %% above what is alive in it",
                 100.0 * (static_cast<double>(r.arena) / static_cast<double>(std::max<remat::bytes_t>(1, r.live_peak)) - 1)));
  row("measured peak", size(planned.peak) + (planned.peak <= r.budget ? ", within the budget" : ", OVER THE BUDGET"));
  row("plain model's peak", size(eager.peak));
  row("time per step", number("%.4f s; plain model %.4f s; ratio %.3f", seconds, eager_seconds, seconds / eager_seconds));
  row("planning", number("%.1f s (%s), capture %.1f s, profile %.1f s", r.plan_seconds, r.solver.c_str(), r.capture_seconds,
                         r.profile_seconds));
  row("recomputed", number("%zu of %zu operations", r.recomputed, operations));
  row("predicted time", number("%.4f s, bound %.4f s, gap %.2f %%", r.step_seconds, r.bound, 100 * r.gap));
  row("losses", number("%.4f to %.4f, largest difference %g", first_loss, last_loss, loss_difference));
  row("gradients", number("largest difference %g%s", gradient_difference, bitwise ? ", equal bit by bit at every step" : ""));

  const auto timeline = remat::trace(plan.problem, plan.schedule).memory;
  eager.memory.label = "plain model, measured";
  planned.memory.label = "wrapped, measured";
  const remat::timeline_style style{.title = "Memory of a training step: planned inside the budget, and measured",
                                    .budget = r.budget,
                                    .overlays = {eager.memory, planned.memory}};
  std::printf("\n%s", remat::timeline_text(timeline, style).c_str());

  std::filesystem::create_directories(a.folder);
  remat::write_file(a.folder + "/memory.svg", remat::timeline_svg(timeline, style));
  const nlohmann::ordered_json result = {{"budget", r.budget},
                                         {"planned_peak", r.total()},
                                         {"measured_peak", planned.peak},
                                         {"store_all_peak", store_all_peak},
                                         {"eager_peak", eager.peak},
                                         {"held", r.held()},
                                         {"arena", r.arena},
                                         {"live_peak", r.live_peak},
                                         {"eager_seconds", eager_seconds},
                                         {"seconds", seconds},
                                         {"planning_seconds", r.plan_seconds},
                                         {"capture_seconds", r.capture_seconds},
                                         {"profile_seconds", r.profile_seconds},
                                         {"solver", r.solver},
                                         {"operations", operations},
                                         {"recomputed", r.recomputed},
                                         {"bound", r.bound},
                                         {"gap", r.gap},
                                         {"steps", a.steps},
                                         {"loss_difference", loss_difference},
                                         {"gradient_difference", gradient_difference},
                                         {"bitwise", bitwise},
                                         {"unplanned_allocations", r.unplanned_allocations}};
  remat::write_file(a.folder + "/result.json", result.dump(2) + "\n");
  remat::write_problem(a.folder + "/problem.json", plan.problem);  // for the program `remat`
  std::printf("\nwritten to %s: result.json, memory.svg, problem.json\n", a.folder.c_str());
  return bitwise && planned.peak <= r.budget ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  arguments a;
  CLI::App app{"Trains a GPT-2-like model on a text inside a budget, next to the plain model."};
  app.add_option("text", a.text, "file to learn from")->required()->check(CLI::ExistingFile);
  app.add_option("folder", a.folder, "where result.json and memory.svg go")->required();
  app.add_option("--budget", a.budget, "512MiB for everything, or N% of the activations")->capture_default_str();
  app.add_option("--steps", a.steps)->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--batch", a.batch)->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--context", a.model.context)->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--layers", a.model.layers)->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--width", a.model.width, "a multiple of 8, the number of heads")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--dropout", a.model.dropout)->capture_default_str()->check(CLI::Range(0.0, 1.0));
  CLI11_PARSE(app, argc, argv);
  try {
    return run(a);
  } catch (const std::exception& why) {
    std::fprintf(stderr, "quickstart: %s\n", why.what());
    return 2;
  }
}
