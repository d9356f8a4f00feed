/* A program whose node has gone sees no device, as without a card. */
#include "must.h"

int main(void)
{
	MUST(setenv("BOWLINE_VERBS_NODE", "/nowhere/node.verbs", 1) == 0);
	for (int times = 0; times < 2; times++) {
		int count = -1;
		struct ibv_device **list = ibv_get_device_list(&count);
		MUST(list && !list[0] && count == 0);
		ibv_free_device_list(list);
	}
	MUST(unsetenv("BOWLINE_VERBS_NODE") == 0);
	MUST(ibv_close_device(opened()) == 0);
	return 0;
}
