/*
 * lk_mode.c
 *	  The conflict table of row locks (lk_mode.h).
 */
#include "lk_mode.h"

#define BIT(mode) (1u << (mode))

static const struct
{
	unsigned	conflicts;		/* set of BIT(mode) */
	const char *name;
}			modes[LK_MODES] = {
	[LK_KEY_SHARE] = {BIT(LK_EXCLUSIVE), "KEY SHARE"},
	[LK_SHARE] = {BIT(LK_NO_KEY_EXCLUSIVE) | BIT(LK_EXCLUSIVE), "SHARE"},
	[LK_NO_KEY_EXCLUSIVE] = {BIT(LK_SHARE) | BIT(LK_NO_KEY_EXCLUSIVE) | BIT(LK_EXCLUSIVE), "NO KEY UPDATE"},
	[LK_EXCLUSIVE] = {BIT(LK_KEY_SHARE) | BIT(LK_SHARE) | BIT(LK_NO_KEY_EXCLUSIVE) | BIT(LK_EXCLUSIVE), "UPDATE"},
};

bool
lk_conflict(lk_mode held, lk_mode wanted)
{
	if ((unsigned) held >= LK_MODES || (unsigned) wanted >= LK_MODES)
		return true;
	return (modes[held].conflicts & BIT(wanted)) != 0;
}

const char *
lk_mode_name(lk_mode mode)
{
	return (unsigned) mode < LK_MODES ? modes[mode].name : "?";
}
