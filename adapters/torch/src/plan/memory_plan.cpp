// SPDX-License-Identifier: Apache-2.0
#include "memory_plan.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include <remat/core/evaluate.hpp>

#include "../program/effects.hpp"
#include "../program/views.hpp"

namespace remat::pytorch {
namespace {

bool from_outside(const program& p, index_t v) { return p.values[v].slot != none; }

/// Why addresses of a step differ from one time to the next, whatever is copied; empty: they need not.
std::string reason_to_move(const program& p) {
  const auto on = device_of_step(p);
  const auto named = [&](index_t k) {
    const auto& s = p.slots[k];
    const auto what = s.from == role::input ? "input " : s.from == role::output_grad ? "the gradient of output " : "";
    return what + (s.name.empty() || s.from == role::output_grad ? std::to_string(s.position) : s.name);
  };
  for (index_t k = 0; k < p.slots.size(); ++k) {
    const auto& s = p.slots[k];
    if (s.from != role::constant && s.type.device != on)
      return named(k) + " is on " + s.type.device.str() + ", so its numbers would become part of the graph";
    if (s.from != role::input && s.from != role::output_grad) continue;
    if (p.values[s.value].slot != k) return named(k) + " shares memory with " + named(p.values[s.value].slot);
    if (!apart_or_expanded(s.type.sizes, s.type.strides) || (s.from == role::input && is_expanded(s.type.sizes, s.type.strides)))
      return named(k) + " has elements that share memory";
  }
  for (const auto& w : p.written)
    if (p.slots[w.slot].from == role::input) return "the forward writes to " + named(w.slot);
  for (auto v : p.outputs)
    if (p.from(p.views[v].value) == role::input) return "an output lies in " + named(p.values[p.views[v].value].slot);
  for (const auto* views : {&p.input_grads, &p.parameter_grads})
    for (auto v : *views)
      if (v != none && (p.from(p.views[v].value) == role::input || p.from(p.views[v].value) == role::output_grad))
        return "a gradient lies in " + named(p.values[p.views[v].value].slot);
  return "";
}

/// Bytes [first, second) of its storage that a view touches.
std::pair<bytes_t, bytes_t> extent(const byte_view& v) {
  int64_t last = 0;
  for (std::size_t d = 0; d < v.sizes.size(); ++d) {
    if (v.sizes[d] == 0) return {0, 0};
    last += (v.sizes[d] - 1) * v.strides[d];
  }
  const auto element = static_cast<bytes_t>(c10::elementSize(v.dtype));
  return {v.offset, v.offset + (last + 1) * element};
}

class planner {
 public:
  planner(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles)
      : schedule_(without_tiers(s)),
        profiles_(profiles),
        now_(step->values.size(), none),
        sent_(now_),
        leaving_(now_),
        coming_(now_) {
    plan_.step = std::move(step);
    TORCH_CHECK(profiles.nodes.size() == program_().nodes.size(), "profiles of another program");
  }

  std::unique_ptr<execution_plan::data> run(layout_options o, bytes_t in_place, placing how) {
    const bool fixed = how == placing::fixed;
    zones_ = how == placing::zones;
    if (!device_of_step(program_()).is_cpu()) o.alignment = unit_ = std::max(o.alignment, accelerator_alignment);
    plan_.in_place = in_place;
    find_fetched();
    check();
    if (fixed) plan_.moving_because = reason_to_move(program_());
    if (fixed && plan_.moving_because.empty()) plan_.copied.assign(program_().slots.size(), none);
    copy_given(role::input, 0);
    std::vector<bool> has_run(program_().nodes.size(), false);
    plan_.saves.resize(program_().nodes.size());
    plan_.given = given_early(program_());
    plan_.leaves.resize(program_().parameters.size(), none);
    for (const auto k : leaving_gradients(program_()))
      leaving_gradient_[program_().views[program_().parameter_grads[k]].value] = static_cast<index_t>(k);
    if (std::find(plan_.given.begin(), plan_.given.end(), true) != plan_.given.end()) find_gifts();
    for (const auto& n : program_().nodes) note_origin(n.starts);
    note_origin(program_().after_forward);
    note_origin(program_().after_backward);
    for (std::size_t i = 0; i < schedule_.steps.size(); ++i) {
      const auto what = schedule_.steps[i].what;
      const auto which = schedule_.steps[i].which;
      if (what == action::drop) {
        wait_for(which, i);
        drop(which, time(i));
      } else if (what == action::offload) {
        send(which, i, o.alignment);
      } else if (what == action::prefetch) {
        bring_back(which, i, o.alignment);
      } else if (which == program_().loss) {
        loss_ = time(i);
        leave_forward();
        copy_given(role::output_grad, i);
      } else {
        const bool again = has_run[which];
        has_run[which] = true;
        if (again && program_().nodes[which].random) plan_.saves[which].before = true;
        plan_.recomputed += again;
        compute(i, which, again);
        give(i);
      }
    }
    finish();
    note_reads();
    place(o);
    return std::make_unique<execution_plan::data>(std::move(plan_));
  }

 private:
  static constexpr std::int64_t events = std::int64_t{1} << 24;  // room for the events within a step
  static std::int64_t time(std::size_t i, int event = 0) { return static_cast<std::int64_t>(i) * events + event; }
  const program& program_() const { return *plan_.step; }

  void note_origin(const generator_origin& o) {
    if (o.from == generator_origin::before) plan_.saves[o.node].before = true;
    if (o.from == generator_origin::after) plan_.saves[o.node].after = true;
    if (o.from == generator_origin::forward) plan_.saves_phase[0] = true;
    if (o.from == generator_origin::backward) plan_.saves_phase[1] = true;
  }

  /// As version 1 of the format has it, without tiers. Drops beyond the device are left out: far memory is laid out by what comes
  /// back, and the caller's weights stay.
  static schedule without_tiers(const schedule& s) {
    constexpr tier_id host = device_tier + 1;
    schedule made;
    made.starts = s.starts;
    for (const auto& x : s.steps) {
      if (x.what == action::copy && x.from == device_tier && x.to == host)
        made.offload(x.value());
      else if (x.what == action::copy && x.from == host && x.to == device_tier)
        made.prefetch(x.value());
      else if (x.what != action::drop || x.from == device_tier)
        made.steps.push_back(x);
    }
    if (!made.plain()) throw bad_schedule(0, "it names a tier beyond the device and the host");
    return made;
  }

  /// The schedule is valid, which includes that what has effects keeps its order, and leaves out none of that.
  void check() const {
    const auto some_rate = has_copies(schedule_) ? std::optional(copy_rates{1, 1, 0}) : std::nullopt;
    const auto as_problem = [&](const std::vector<bool>& fetched) {
      return to_problem(program_(), profiles_.seconds(), profiles_.workspace(), "", some_rate, fetched);
    };
    if (fetched_.empty()) {
      evaluate_plain(as_problem({}), schedule_);
    } else {
      evaluate(as_problem(fetched_), schedule_);
    }
    const auto n = static_cast<index_t>(program_().nodes.size());
    std::vector<bool> has_run(n, false);
    for (const auto& x : schedule_.steps)
      if (x.what == action::compute) has_run[x.which] = true;
    for (index_t i = 0; i < n; ++i)
      if (!has_run[i] && has_effects(program_(), program_().nodes[i]))
        throw bad_schedule(schedule_.steps.size(), "node " + std::to_string(i) + " never runs");
  }

  /// What the schedule brings, and is from outside.
  void find_fetched() {
    if (!has_copies(schedule_)) return;
    const auto can = fetchable(program_());
    for (const auto& x : schedule_.steps) {
      if (x.what != action::prefetch || x.which >= can.size() || !can[x.which]) continue;
      fetched_.resize(can.size(), false);
      fetched_[x.which] = true;
    }
  }

  index_t new_buffer(bytes_t bytes, std::int64_t born) {
    plan_.buffers.push_back({bytes, born});
    return static_cast<index_t>(plan_.buffers.size() - 1);
  }
  void leave(index_t b, std::int64_t when) {
    if (b != none && --plan_.buffers[b].values == 0) plan_.buffers[b].dies = when;
  }
  void drop(index_t v, std::int64_t when) {
    if (v < now_.size()) leave(std::exchange(now_[v], none), when);  // the others only order what has effects
  }
  void enter(index_t v, index_t b, std::int64_t when) {
    ++plan_.buffers[b].values;
    leave(std::exchange(now_[v], b), when);  // computed again while it was there: the new one counts
  }
  location where(index_t v) const {
    const bool in_place = from_outside(program_(), v) && (fetched_.empty() || !fetched_[v]);
    if (in_place && program_().values[v].slot != none && program_().slots[program_().values[v].slot].on_host)
      throw bad_schedule(schedule_.steps.size(), program_().values[v].name + " is on the host and never fetched");
    return {in_place ? none : now_[v], v};
  }

  void send(index_t v, std::size_t i, bytes_t alignment) {
    if (v >= now_.size() || sent_[v] != none) return;  // computed again, it has the same bytes
    if (const auto g = leaving_gradient_.find(v); g != leaving_gradient_.end()) {
      planned_move m{v, now_[v], program_().values[v].bytes};
      m.gradient = g->second;
      plan_.leaves[g->second] = sent_[v] = leaving_[v] = begin(std::move(m));
      return;
    }
    planned_move m{v, now_[v], aligned(program_().values[v].bytes, alignment)};
    if (coming_[v] != none) m.after.push_back(coming_[v]);
    sent_[v] = leaving_[v] = begin(std::move(m));
    far_.push_back({time(i), time(i) + 1, plan_.moves.back().bytes});
    far_of_.push_back(sent_[v]);
  }
  void bring_back(index_t v, std::size_t i, bytes_t alignment) {
    if (v >= now_.size()) return;
    const auto& what = program_().values[v];
    planned_move m{v, new_buffer(what.bytes, time(i)), aligned(what.bytes, alignment)};
    if (!fetched_.empty() && fetched_[v]) {
      m.slot = what.slot;
      plan_.buffers[m.buffer].fetched = true;
      m.bytes = what.bytes;
    } else {
      m.brings = sent_[v];
      m.after.push_back(sent_[v]);
    }
    enter(v, m.buffer, time(i));
    coming_[v] = begin(std::move(m));
  }
  index_t begin(planned_move m) {
    const auto k = static_cast<index_t>(plan_.moves.size());
    plan_.moves.push_back(std::move(m));
    pending_.push_back({k, false});
    return k;
  }
  /// What follows waits for the moves of a value that go on.
  void wait_for(index_t v, std::size_t i) {
    if (v >= now_.size()) return;
    for (auto* moves : {&leaving_, &coming_}) {
      const auto k = std::exchange((*moves)[v], none);
      if (k == none) continue;
      pending_.push_back({k, true});
      if (sent_[v] == none) continue;
      const auto place = std::lower_bound(far_of_.begin(), far_of_.end(), sent_[v]) - far_of_.begin();
      if (plan_.moves[sent_[v]].gradient == none) far_[static_cast<std::size_t>(place)].death = time(i) + 1;
    }
  }
  static bytes_t aligned(bytes_t bytes, bytes_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

  bool dies_after(std::size_t i, index_t v) const {
    for (++i; i < schedule_.steps.size() && schedule_.steps[i].what == action::drop; ++i)
      if (schedule_.steps[i].which == v) return true;
    return false;
  }

  void compute(std::size_t i, index_t n, bool again) {
    const auto& node = program_().nodes[n];
    const auto& script = again ? profiles_.nodes[n]->again : profiles_.nodes[n]->first;
    for (auto v : node.inputs) {
      const bool overwritten =
          std::any_of(node.overwrites.begin(), node.overwrites.end(), [&](const auto& versions) { return versions.first == v; });
      if (overwritten || coming_[v] != none) wait_for(v, i);
    }
    for (auto v : node.outputs)
      if (now_[v] != none) wait_for(v, i);
    planned_step s{n, again, std::exchange(pending_, {}), {}, {}, {}, {}};
    std::map<index_t, location> here;  // outputs, and versions that share their buffer
    std::vector<index_t> entered;

    for (const auto& [old, fresh] : node.overwrites) {
      const auto from = where(old);
      const bool in_place = from.buffer != none && plan_.buffers[from.buffer].values == 1 && dies_after(i, old);
      const auto b = in_place ? from.buffer : new_buffer(program_().values[fresh].bytes, time(i));
      if (!in_place) s.copies.push_back({from, {b, fresh}});
      here[fresh] = {b, fresh};
    }
    for (const auto& block : script.blocks) {
      const bool temporary = block.result == none && block.freed >= 0;
      if (block.result == none && !temporary) {
        s.blocks.push_back(none);  // kept by the operator
        continue;
      }
      const auto b = new_buffer(block.bytes, time(i, block.born + 1));
      s.blocks.push_back(b);
      if (temporary)
        plan_.buffers[b].dies = time(i, block.freed + 1);
      else
        here[node.outputs[block.result]] = {b, node.outputs[block.result]};
    }
    for (const auto& c : node.calls) {
      placed_call placed{&c, {}, {}};
      for (const auto& o : c.operands) {
        const auto v = program_().views[o.view].value;
        const auto found = here.find(v);
        placed.operands.push_back(found != here.end() ? found->second : where(v));
      }
      for (const auto& r : c.results) {
        const auto v = program_().views[r.view].value;
        if (!here.count(v))  // not in the script: an empty tensor, or a script that could not tell
          here[v] = {new_buffer(program_().values[v].bytes, time(i)), v};
        placed.results.push_back(here[v]);
      }
      s.calls.push_back(std::move(placed));
    }
    for (auto v : node.outputs)
      if (const auto found = here.find(v); found != here.end()) enter(v, found->second.buffer, time(i + 1));
    elsewhere_ = std::max(elsewhere_, profiles_.nodes[n]->elsewhere);
    plan_.steps.push_back(std::move(s));
    plan_.scripts.push_back(script);
  }

  /// When gradients are given: once nothing reads their parameters, and so not always where the schedule has it.
  void find_gifts() {
    std::vector<std::size_t> last_read(program_().values.size(), 0);
    for (std::size_t i = 0; i < schedule_.steps.size(); ++i)
      if (schedule_.steps[i].what == action::compute)
        for (auto v : program_().nodes[schedule_.steps[i].which].inputs) last_read[v] = i;
    for (auto n = program_().nodes.rbegin(); n != program_().nodes.rend(); ++n)  // what reads a later version reads the place
      for (const auto& [old, fresh] : n->overwrites) last_read[old] = std::max(last_read[old], last_read[fresh]);
    std::set<index_t> kept;
    for (const auto* views : {&program_().outputs, &program_().input_grads})
      for (auto v : *views)
        if (v != none) kept.insert(program_().views[v].value);
    for (std::size_t i = 0; i < schedule_.steps.size(); ++i) {
      const auto k = schedule_.steps[i].what == action::compute ? program_().nodes[schedule_.steps[i].which].gives : none;
      if (k == none) continue;
      const auto v = program_().views[program_().parameter_grads[k]].value;
      const auto when = std::max(i, last_read[program_().slots[program_().parameters[k]].value]);
      gifts_.emplace(when, gift{k, {none, v}, last_read[v] > when || kept.count(v) > 0 || shares_bytes(k)});
    }
  }
  /// The gradient of parameter k lies where that of another one does.
  bool shares_bytes(index_t k) const {
    const auto& own = program_().views[program_().parameter_grads[k]];
    const auto range = extent(own);
    for (index_t other = 0; other < program_().parameter_grads.size(); ++other) {
      const auto& view = program_().views[program_().parameter_grads[other]];
      const auto theirs = extent(view);
      if (other != k && view.value == own.value && theirs.first < range.second && range.first < theirs.second) return true;
    }
    return false;
  }
  /// Gives what is given behind step i. What the schedule gives there is held until then.
  void give(std::size_t i) {
    if (const auto k = program_().nodes[schedule_.steps[i].which].gives; k != none) {
      auto& g = std::find_if(gifts_.begin(), gifts_.end(), [&](const auto& x) { return x.second.parameter == k; })->second;
      wait_for(g.at.value, i);
      g.at = where(g.at.value);
      if (const auto b = g.at.buffer; b != none) ++plan_.buffers[b].values, ++held_gifts_[b];
    }
    const auto [first, last] = gifts_.equal_range(i);
    for (auto g = first; g != last; ++g) {
      auto what = g->second;
      const auto& [b, v] = what.at;
      what.copy = what.copy || b == none || plan_.buffers[b].kept ||
                  plan_.buffers[b].values > held_gifts_[b] + (now_[v] == b ? 1 : 0);  // another value is there
      if (what.copy) gift_copies_ = std::max(gift_copies_, rounded(program_().values[v].bytes));
      plan_.steps.back().gifts.push_back(what);
      if (b != none) --held_gifts_[b];
      leave(b, time(i + 1));
    }
  }

  /// The caller gets the outputs.
  void leave_forward() {
    plan_.after_forward = std::exchange(pending_, {});
    plan_.loss = plan_.steps.size();
    for (auto v : program_().outputs) plan_.outputs.push_back(keep(v));
    plan_.held = plan_.outside;
    for (auto v : program_().output_grads)
      if (v != none) plan_.outside += rounded(program_().values[program_().views[v].value].bytes);
  }
  location keep(index_t view) {
    const auto l = where(program_().views[view].value);
    if (l.buffer == none || std::exchange(plan_.buffers[l.buffer].kept, true)) return l;
    ++plan_.buffers[l.buffer].values;  // never written in place, never dead
    if (plan_.copied.empty()) {
      plan_.buffers[l.buffer].outside = true;
      plan_.outside += rounded(plan_.buffers[l.buffer].bytes);
    }
    return l;
  }
  /// With fixed addresses, what the caller gives lies in the arena from step `i` on.
  void copy_given(role from, std::size_t i) {
    for (index_t k = 0; k < plan_.copied.size(); ++k) {
      if (program_().slots[k].from != from) continue;
      plan_.copied[k] = new_buffer(program_().values[program_().slots[k].value].bytes, time(i));
      plan_.buffers[plan_.copied[k]].kept = true;
    }
  }
  /// What an allocator takes for so many bytes.
  bytes_t rounded(bytes_t bytes) const { return aligned(bytes, unit_); }

  void finish() {
    for (index_t v = 0; v < now_.size(); ++v) wait_for(v, schedule_.steps.size());
    plan_.after_backward = std::exchange(pending_, {});
    plan_.outside += elsewhere_ + gift_copies_;
    for (std::size_t k = 0; k < plan_.given.size(); ++k) {
      const auto of = [&](const planned_move& m) { return m.slot == program_().parameters[k]; };
      const auto last = std::find_if(plan_.moves.rbegin(), plan_.moves.rend(), of);
      if (plan_.given[k] && last != plan_.moves.rend()) last->before_its_step = true;
    }
    for (auto v : program_().input_grads) plan_.input_grads.push_back(v == none ? location{} : keep(v));
    std::vector<std::pair<index_t, std::pair<bytes_t, bytes_t>>> taken;
    for (std::size_t k = 0; k < plan_.given.size(); ++k) {
      if (plan_.given[k] || plan_.leaves[k] != none) {
        plan_.copy_grad.push_back(false);
        plan_.parameter_grads.emplace_back();
        continue;
      }
      const auto& view = program_().views[program_().parameter_grads[k]];
      const auto l = where(view.value);
      const auto range = extent(view);
      const bool sum = l.buffer == none && program_().from(l.value) == role::gradient;
      const bool moved = std::any_of(plan_.moves.begin(), plan_.moves.end(), [&](const auto& m) { return m.buffer == l.buffer; });
      const bool shared = !sum && (l.buffer == none || plan_.buffers[l.buffer].kept || (zones_ && moved) ||
                                   std::any_of(taken.begin(), taken.end(), [&](const auto& t) {
                                     return t.first == l.buffer && t.second.first < range.second && range.first < t.second.second;
                                   }));
      if (sum)
        plan_.sums.push_back(program_().values[l.value].slot);
      else if (shared)
        plan_.outside += rounded(range.second - range.first);
      else
        taken.emplace_back(l.buffer, range);
      if (zones_ && !sum && !shared) {
        keep(program_().parameter_grads[k]);
        plan_.outside += rounded(range.second - range.first);  // the sum of those of other steps, which autograd has
      }
      plan_.copy_grad.push_back(shared);
      plan_.parameter_grads.push_back(l);
    }
  }

  void note_reads() {
    std::set<index_t> outside, buffers;
    for (std::size_t i = plan_.loss; i < plan_.steps.size(); ++i) {
      auto note = [&](const location& l) {
        if (l.buffer != none) buffers.insert(l.buffer);
        if (from_outside(program_(), l.value)) outside.insert(l.value);
      };
      for (const auto& c : plan_.steps[i].calls)
        for (const auto& l : c.operands) note(l);
      for (const auto& [from, to] : plan_.steps[i].copies) note(from);
    }
    for (const auto& l : plan_.outputs) plan_.reads.outputs.push_back(l.buffer != none && buffers.count(l.buffer) > 0);
    plan_.reads.outside.assign(outside.begin(), outside.end());
  }

  static constexpr bytes_t page_bytes = 4096;
  static bytes_t slack_of(const buffer& b, const layout_options& o) {
    return b.fetched && b.bytes >= 16 * page_bytes ? std::max<bytes_t>(0, page_bytes - o.alignment) : 0;
  }
  void place(const layout_options& o) {
    const auto end = time(schedule_.steps.size() + 1);
    struct zone {
      std::vector<allocation> list;
      std::vector<index_t> which;
    } arena, working;
    bytes_t held = 0;
    for (index_t b = 0; b < plan_.buffers.size(); ++b) {
      auto& x = plan_.buffers[b];
      if (x.outside || x.bytes == 0) continue;
      const auto dies = x.dies < 0 ? end : std::max(x.dies, x.born + 1);
      const bool stays = x.born < loss_ && loss_ < dies;
      if (stays) held += rounded(x.bytes);
      x.working = zones_ && !stays;
      auto& z = x.working ? working : arena;
      z.list.push_back({x.born, dies, x.bytes + slack_of(x, o)});
      z.which.push_back(b);
    }
    const auto bytes_of = [&](const zone& z) {
      const auto l = lay_out(z.list, o);
      for (std::size_t i = 0; i < z.which.size(); ++i) {
        auto& x = plan_.buffers[z.which[i]];
        x.offset = slack_of(x, o) > 0 ? aligned(l.offsets[i], page_bytes) : l.offsets[i];
      }
      plan_.live += l.live_peak;
      return plan_.moves.empty() ? l.arena : aligned(l.arena, o.alignment);
    };
    plan_.arena = bytes_of(arena);
    plan_.working = bytes_of(working);
    plan_.held += zones_ ? plan_.arena : held;
    const auto beyond = lay_out(far_, {.alignment = o.alignment, .tries = 0});
    for (std::size_t i = 0; i < far_.size(); ++i) plan_.moves[far_of_[i]].far = beyond.offsets[i];
    for (auto& m : plan_.moves) {
      if (m.brings != none) m.far = plan_.moves[m.brings].far;
      TORCH_CHECK(!plan_.buffers[m.buffer].kept, "a value that the caller gets is moved");
    }
    plan_.far = beyond.arena;
  }

  const schedule schedule_;
  const program_profile& profiles_;
  std::multimap<std::size_t, gift> gifts_;  ///< by the step behind which they are given
  std::map<index_t, int> held_gifts_;       ///< per buffer: those that lie there
  bytes_t gift_copies_ = 0;                 ///< of the largest gift that is a copy
  execution_plan::data plan_;
  bool zones_ = false;
  std::int64_t loss_ = 0;                        ///< when the forward ends
  bytes_t unit_ = 64;                            ///< of allocations outside of the arena, bytes
  bytes_t elsewhere_ = 0;                        ///< most that other threads allocate during a step
  std::vector<bool> fetched_;                    ///< per value; empty: none is
  std::map<index_t, index_t> leaving_gradient_;  ///< by value: the parameter of the host
  std::vector<index_t> now_;                     ///< per value: its buffer, none if it is not on the device
  std::vector<index_t> sent_;                    ///< per value: the move that sent it
  std::vector<index_t> leaving_, coming_;        ///< per value: the move that nobody has waited for
  std::vector<move_step> pending_;               ///< before what comes next
  std::vector<allocation> far_;                  ///< of what is sent, in far memory
  std::vector<index_t> far_of_;                  ///< the same: the moves
};

}  // namespace

execution_plan::execution_plan(std::shared_ptr<const program> step, const schedule& s, const program_profile& profiles,
                               const layout_options& o, bytes_t in_place, placing how)
    : data_(planner(std::move(step), s, profiles).run(o, in_place, how)) {}
execution_plan::~execution_plan() = default;
bytes_t execution_plan::arena_bytes() const { return data_->arena; }
bytes_t execution_plan::working_bytes() const { return data_->working; }
bytes_t execution_plan::held_bytes() const { return data_->held; }
bytes_t execution_plan::live_peak() const { return data_->live; }
bytes_t execution_plan::far_bytes() const { return data_->far; }
std::pair<bytes_t, bytes_t> execution_plan::moved_bytes() const {
  std::pair<bytes_t, bytes_t> sum;
  for (const auto& m : data_->moves)
    if (m.slot == none && m.gradient == none) (m.brings == none ? sum.first : sum.second) += m.bytes;
  return sum;
}
bytes_t execution_plan::fetched_bytes() const {
  bytes_t sum = 0;
  for (const auto& m : data_->moves)
    if (m.slot != none) sum += m.bytes;
  return sum;
}
bytes_t execution_plan::in_place_bytes() const { return data_->in_place; }
bytes_t execution_plan::outside_bytes() const { return data_->outside; }
std::size_t execution_plan::operations() const { return data_->steps.size(); }
std::size_t execution_plan::recomputed() const { return data_->recomputed; }
const program& execution_plan::step() const { return *data_->step; }
const std::string& execution_plan::moves_because() const { return data_->moving_because; }
const execution_plan::reads& execution_plan::read_in_backward() const { return data_->reads; }

}  // namespace remat::pytorch
