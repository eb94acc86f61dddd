// SPDX-License-Identifier: Apache-2.0
// With a device, its figures must make sense. Without a device, the error must say so.
#include <catch2/catch.hpp>

#include <remat/cuda/device.hpp>

TEST_CASE("Devices and copy rates, or an error that says why not") {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) {
    for (const auto& d : remat::cuda::devices()) {
      CHECK(!d.name.empty());
      CHECK(d.free <= d.total);
    }
    const auto rates = remat::cuda::measure_copies();
    CHECK(rates.to_host > 1e8);
    CHECK(rates.to_device > 1e8);
    CHECK(rates.latency >= 0);
  } else {
    CHECK_THROWS_AS(remat::cuda::devices(), remat::not_available);
    CHECK_THROWS_AS(remat::cuda::measure_copies(), remat::not_available);
  }
  CHECK_THROWS_AS(remat::cuda::measure_copies({.bytes = 0}), remat::bad_option);
  CHECK_THROWS_AS(remat::cuda::measure_copies({.repetitions = 0}), remat::bad_option);
}
