// The non-template part of Beast, compiled once for the whole program.
#include <boost/beast/src.hpp>
