// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exchange formats remat-problem and remat-schedule. Needs nlohmann/json; not part of the umbrella header.
///
/// The readers accept untrusted documents. Length, nesting and number of members are limited. Every error is an exception that
/// names the member and its index. Members that the library does not know are ignored, but kept so that they can be written
/// back.
#pragma once

#include <remat/io/problem_document.hpp>
#include <remat/io/schedule_document.hpp>
