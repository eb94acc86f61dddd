// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <cmath>
#include <sstream>

#include <remat/io/bytes.hpp>
#include <remat/pytorch/budget.hpp>

#include "../base/clock.hpp"

namespace remat::pytorch {

budget::budget(const std::string& text) {
  const auto sign = text.find('%');
  if (sign == text.npos) {
    total = parse_bytes(text);
    return;
  }
  const auto of = text.substr(sign + 1);
  if (of == " of activations")
    share_of = pytorch::share::activations;
  else if (of == " of device")
    share_of = pytorch::share::device;
  else if (!of.empty())
    throw bad_option("\"" + text + "\" is not a budget: after the % goes nothing, \"of activations\" or \"of device\"");
  double percent = 0;
  const char* const end = text.data() + sign;
  const auto [rest, failed] = std::from_chars(text.data(), end, percent, std::chars_format::fixed);
  if (failed != std::errc{} || rest != end || !std::isfinite(percent) || std::signbit(percent) || percent > 1e6)
    throw bad_option("\"" + text + "\" is not a budget: no percentage >= 0");
  if (share_of == pytorch::share::device && percent > 100)
    throw bad_option("\"" + text + "\" is not a budget: a device has no more than 100 % of its memory");
  share = percent / 100;
}

budget::budget(bytes_t bytes) : total(bytes) {
  if (bytes < 0) throw bad_option("budget must be >= 0 bytes, got " + std::to_string(bytes));
}

budget budget::activations(bytes_t bytes) {
  if (bytes < 0) throw bad_option("budget must be >= 0 bytes, got " + std::to_string(bytes));
  budget b;
  b.for_the_step = bytes;
  return b;
}

std::string report::text() const {
  std::ostringstream out;
  auto row = [&](const char* name, const std::string& value) {
    out << name << std::string(28 - std::string(name).size(), ' ') << value << "\n";
  };
  row("budget", format_bytes(budget));
  row("  parameters", format_bytes(parameters));
  row("  buffers", format_bytes(buffers));
  row("  inputs", format_bytes(inputs));
  row("  constants", format_bytes(constants));
  row("  optimizer", format_bytes(optimizer));
  if (workspaces > 0) row("  workspaces of libraries", format_bytes(workspaces));
  row("  gradients of before", format_bytes(gradients));
  row("  left for activations", format_bytes(left));
  if (in_flight > 1) row("steps in flight", std::to_string(in_flight));
  row("arena", format_bytes(arena));
  row("  alive at most", format_bytes(live_peak));
  if (!placed) row("  placement", "not guaranteed: the device's allocator chooses addresses, and may reserve more");
  row("outputs", format_bytes(outputs));
  row("plain step: arena + outputs", format_bytes(store_all));
  if (in_place > 0) row("weights, where they are", format_bytes(in_place));
  if (unplanned_bytes > 0) row("outside of the plan", format_bytes(unplanned_bytes) + ", by " + unplanned_operation);
  row("operations", std::to_string(operations) + ", of these recomputed " + std::to_string(recomputed));
  if (far > 0)
    row("far memory", format_bytes(far) + ", of a step out " + format_bytes(moved_out) + ", in " + format_bytes(moved_in) +
                          ", waited " + format_seconds(waited) + " so far");
  if (fetched > 0)
    row("weights", "fetched " + format_bytes(fetched) + " in a step, waited " + format_seconds(waited) + " so far");
  row("predicted time",
      format_seconds(step_seconds) + ", plain " + format_seconds(store_all_seconds) + ", bound " + format_seconds(bound));
  row("solver", solver + " in " + format_seconds(plan_seconds));
  row("capture, profile", format_seconds(capture_seconds) + ", " + format_seconds(profile_seconds));
  return out.str();
}

}  // namespace remat::pytorch
