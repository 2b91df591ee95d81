// What of Beast is no template, for the whole program.
#include <boost/beast/src.hpp>
