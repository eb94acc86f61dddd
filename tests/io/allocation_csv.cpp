// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <catch2/catch.hpp>
#include <remat/io/allocation_csv.hpp>
#include <sstream>
#include <string>
#include <vector>

using namespace remat;

TEST_CASE("allocations are read by column name, and written with offsets") {
  const auto t = parse_allocations("size,id,upper,offset,lower\r\n12,first,4,0,-1\r\n\r\n0,b,7,,2\n");
  REQUIRE(t.ids == std::vector<std::string>{"first", "b"});
  CHECK(t.list[0].birth == -1);
  CHECK(t.list[0].death == 4);
  CHECK(t.list[0].bytes == 12);
  CHECK(t.list[1].birth == 2);
  CHECK(t.list[1].death == 7);
  CHECK(t.list[1].bytes == 0);
  std::ostringstream out;
  write_allocations(out, t, std::vector<bytes_t>{0, 64});
  CHECK(out.str() == "id,lower,upper,size,offset\nfirst,-1,4,12,0\nb,2,7,0,64\n");
  CHECK(parse_allocations(out.str()).ids == t.ids);
  CHECK(parse_allocations("id,lower,upper,size\n").list.empty());
  CHECK(parse_allocations("\xEF\xBB\xBFid,lower,upper,size\na,0,3,4\n").ids == std::vector<std::string>{"a"});
}

TEST_CASE("the error for a bad CSV names the line and the field") {
  const std::string head = "id,lower,upper,size\n0,0,9,1\n";
  for (const auto& [text, line, why] :
       std::vector<std::array<std::string, 3>>{{"", "line 1", "empty"},
                                               {"id,lower,upper\n", "line 1", "field \"size\" is missing"},
                                               {"id,lower,upper,size,alignment\n", "line 1", "field \"alignment\""},
                                               {"id,lower,upper,size,id\n", "line 1", "field \"id\" is there twice"},
                                               {head + "1,0,9\n", "line 3", "3 fields"},
                                               {head + "1,0,9,1,7\n", "line 3", "5 fields"},
                                               {head + "\n1,x,9,1\n", "line 4", "field \"lower\": \"x\""},
                                               {head + "1,0,9.5,1\n", "line 3", "field \"upper\": \"9.5\""},
                                               {head + "1,0,9,\n", "line 3", "field \"size\": \"\""},
                                               {head + "1,0,9,99999999999999999999\n", "line 3", "field \"size\""},
                                               {head + "1,0,9223372036854775807,1\n", "line 3", "field \"upper\""},
                                               {head + "1,9,9,1\n", "line 3", "field \"upper\": 9 is not above"},
                                               {head + "1,0,9,-1\n", "line 3", "field \"size\": -1 is negative"},
                                               {head + "1,0,9,9007199254740992\n", "line 3", "field \"size\""},
                                               {head + "0,0,9,1\n", "line 3", "field \"id\": \"0\""}}) {
    CAPTURE(text);
    try {
      parse_allocations(text);
      FAIL("accepted");
    } catch (const bad_document& found) {
      CHECK(std::string(found.what()).find(line) == 0);
      CHECK(std::string(found.what()).find(why) != std::string::npos);
    }
  }
  CHECK_THROWS_AS(read_allocations("/nowhere/at/all.csv"), bad_document);
}
