// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exchange formats remat-problem and remat-schedule. Needs nlohmann/json; not part of the umbrella header.
///
/// Reading trusts nothing: length, nesting and number of members are bounded, and whatever is wrong ends in an exception that
/// names the member and its index. Members that the library does not know are kept for writing back, and otherwise ignored.
#pragma once

#include <remat/io/problem_document.hpp>
#include <remat/io/schedule_document.hpp>
