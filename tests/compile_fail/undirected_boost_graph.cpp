// SPDX-License-Identifier: Apache-2.0
// expect: boost_graph
#include <boost/graph/adjacency_list.hpp>

#include <remat/graph/boost.hpp>

using graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::undirectedS>;
// broken
static_assert(remat::boost_graph<graph>);
// end
