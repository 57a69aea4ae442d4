/*
 * test_lk.c
 *	  The conflict table of row locks against the one in PostgreSQL's manual (section "Row-Level Locks").
 */
#include "../lk_mode.h"

#include <stdio.h>
#include <string.h>

static int	checks,
			failures;

static void
check(bool ok, const char *what)
{
	checks++;
	if (!ok)
	{
		printf("not ok - %s\n", what);
		failures++;
	}
}

int
main(void)
{
	/* rows: held; columns: wanted; KEY SHARE, SHARE, NO KEY UPDATE, UPDATE */
	static const char *const expected[LK_MODES] = {"...X", "..XX", ".XXX", "XXXX"};

	for (int held = 0; held < LK_MODES; held++)
		for (int wanted = 0; wanted < LK_MODES; wanted++)
		{
			check(lk_conflict(held, wanted) == (expected[held][wanted] == 'X'), "conflict as documented");
			check(lk_conflict(held, wanted) == lk_conflict(wanted, held), "conflicts are symmetric");
			/* a stronger mode conflicts with all that a weaker one conflicts with */
			if (held > 0 && lk_conflict(held - 1, wanted))
				check(lk_conflict(held, wanted), "modes grow stronger");
		}
	check(lk_conflict((lk_mode) 4, LK_KEY_SHARE), "an unknown mode conflicts");
	check(lk_conflict(LK_KEY_SHARE, (lk_mode) -1), "an unknown mode conflicts");
	check(strcmp(lk_mode_name(LK_NO_KEY_EXCLUSIVE), "NO KEY UPDATE") == 0, "name");
	check(strcmp(lk_mode_name((lk_mode) 7), "?") == 0, "name of no mode");
	printf("%d passed, %d failed\n", checks - failures, failures);
	return failures != 0;
}
