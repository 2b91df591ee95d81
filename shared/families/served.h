// The families that a program supports. Each program defines served() in its families.cpp.
#pragma once

#include "shared/families/family.h"

namespace ditfleet::families {

Families served();

}  // namespace ditfleet::families
