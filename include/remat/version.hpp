// SPDX-License-Identifier: Apache-2.0
/// @file
/// The version of the library, as numbers for the preprocessor and as text.
/// @code
/// #if REMAT_VERSION_MAJOR == 0 && REMAT_VERSION_MINOR < 3
/// #error "remat 0.3 or newer is needed"
/// #endif
/// @endcode
#pragma once

#define REMAT_VERSION_MAJOR 0
#define REMAT_VERSION_MINOR 3
#define REMAT_VERSION_PATCH 0
#define REMAT_VERSION "0.3.0"
