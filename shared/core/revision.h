// The revision that this program was built from; revision.cmake writes the definition.
#pragma once

namespace ditfleet {

// The first 12 digits of the commit, or DITFLEET_REVISION of the build's environment; else "unknown". Needs the library
// ditfleet_revision, which only programs link: a new commit then links nothing else.
extern const char* const kRevision;

}  // namespace ditfleet
