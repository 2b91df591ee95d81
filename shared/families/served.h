// The families of one program. Each program defines the function in its families.cpp, the only file that names them.
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

Families served();

}  // namespace ditfleet::families
