// SPDX-License-Identifier: Apache-2.0
/// @file
/// Messages of exceptions, without the place in PyTorch where these come from. Private to the adapter.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace remat::pytorch {

/// The message without a stack trace.
inline std::string message_of(const std::exception& e) {
  const auto* const error = dynamic_cast<const c10::Error*>(&e);
  return error != nullptr ? error->what_without_backtrace() : e.what();
}

/// The first line of the message. PyTorch adds hints, and errors of kernels add a stack trace.
inline std::string reason_of(const std::exception& e) {
  const auto text = message_of(e);
  return text.substr(0, text.find('\n'));
}

}  // namespace remat::pytorch
