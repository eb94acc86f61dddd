// SPDX-License-Identifier: Apache-2.0
#include "user_line.hpp"

#include <sstream>

namespace remat::pytorch::exported {

std::string line_of_user(const std::string& trace) {
  std::istringstream in(trace);
  std::string line, best, code;
  bool taken = false;
  while (std::getline(in, line)) {
    const auto begin = line.find("File \"");
    if (begin == std::string::npos) {
      if (taken && code.empty() && line.find_first_not_of(' ') != std::string::npos)
        code = line.substr(line.find_first_not_of(' '));
      continue;
    }
    const auto end = line.find('"', begin + 6);
    const auto number = line.find("line ");
    taken = end != std::string::npos && number != std::string::npos && line.find("site-packages/") == std::string::npos;
    if (!taken && !best.empty()) continue;
    if (end == std::string::npos || number == std::string::npos) continue;
    best = line.substr(begin + 6, end - begin - 6) + ":" + line.substr(number + 5, line.find(',', number) - number - 5);
    code.clear();
  }
  if (best.empty()) return "an unknown line";
  return code.empty() ? best : best + ": " + code;
}

}  // namespace remat::pytorch::exported
